// Opens dashboards in a real browser and says what each panel came to: node draw.mjs CHROMIUM FOLDER URL...
// Prints one JSON object a line: {"url", "panels": [{"id", "title", "state", "words"}], "problems": [...], "picture"}, and
// writes a picture of each page to FOLDER, named by its dashboard. Rule: whatever the page complains of is reported.
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';

import { chromium } from 'playwright-core';
import UPNG from 'upng-js';

const PATIENCE = 300_000; // milliseconds for the browser to start, and for each step of a page, which takes two seconds on an idle machine
const SETTLED = 400; // milliseconds in which graphs that have their data are painted
const COLORS = 256; // a picture of these is half as large and looks the same
const [executablePath, folder, ...urls] = process.argv.slice(2);
const browser = await chromium.launch({
  executablePath,
  timeout: PATIENCE,
  args: ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--hide-scrollbars'],
});
try {
  for (const url of urls) {
    console.log(JSON.stringify(await draw(url)));
  }
} finally {
  await browser.close();
}

async function draw(url) {
  const given = new URL(url).searchParams;
  const viewport = { width: Number(given.get('width') ?? 1600), height: 1000 };
  const page = await browser.newPage({ viewport, reducedMotion: 'reduce' });
  const problems = [];
  page.on('pageerror', (error) => problems.push(String(error)));
  page.on('console', (message) => message.type() === 'error' && problems.push(message.text()));
  page.on('requestfailed', (request) => problems.push(`${request.url()}: ${request.failure()?.errorText}`));
  page.setDefaultTimeout(PATIENCE);
  await page.goto(url);
  await page.waitForSelector('#dashboard[data-done="true"], body[data-error]', { state: 'attached' });
  const broken = await page.getAttribute('body', 'data-error');
  if (broken) {
    problems.push(broken);
  }
  await page.evaluate(() => document.fonts.ready);
  await page.waitForTimeout(SETTLED);
  const panels = await page.$$eval('[data-panel]', (elements) =>
    elements.map(({ dataset }) => ({ id: Number(dataset.panel), title: dataset.title, state: dataset.state, words: dataset.words }))
  );
  const picture = join(folder, `${given.get('dashboard')}.png`);
  const taken = UPNG.decode(await page.screenshot({ fullPage: true }));
  writeFileSync(picture, Buffer.from(UPNG.encode(UPNG.toRGBA8(taken), taken.width, taken.height, COLORS)));
  await page.close();
  return { url, panels, problems, picture };
}
