// A real browser that does what it is told: node browser.mjs CHROMIUM, orders as JSON lines in, answers as JSON lines out.
// {"do": "open", "url"}, {"do": "run", "script"}, {"do": "mouse", ...}, {"do": "picture", "path", "width", "height"}; each answer is {"value"} or {"error"}.
// Rule: whatever the page complains of, and every request that leaves it, is kept for {"do": "complaints"}.
import { createInterface } from 'node:readline';

import { chromium } from 'playwright-core';

const PATIENCE = 300_000;
const browser = await chromium.launch({ executablePath: process.argv[2], timeout: PATIENCE, args: ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--hide-scrollbars'] });
const page = await browser.newPage({ viewport: { width: 1500, height: 1000 }, reducedMotion: 'reduce' });
page.setDefaultTimeout(PATIENCE);
const complaints = [], requests = [];
page.on('pageerror', (error) => complaints.push(String(error)));
page.on('console', (message) => message.type() === 'error' && complaints.push(message.text()));
page.on('dialog', (dialog) => { complaints.push(`dialog: ${dialog.message()}`); void dialog.dismiss(); });
page.on('request', (request) => requests.push(request.url()));

const orders = {
  open: async ({ url }) => { await page.goto(url); await page.waitForSelector('body[data-ready="true"]', { state: 'attached' }); },
  until: async ({ script }) => { // not by waitForFunction, which evaluates a string within the page: its policy refuses that
    for (const end = Date.now() + PATIENCE; !(await page.evaluate(script)); await page.waitForTimeout(50)) {
      if (Date.now() > end) throw new Error(`waited ${PATIENCE} ms for ${script}; complaints: ${complaints}`);
    }
  },
  run: async ({ script }) => page.evaluate(script),
  click: async ({ selector }) => page.click(selector),
  select: async ({ selector, value }) => page.selectOption(selector, value),
  move: async ({ x, y }) => page.mouse.move(x, y, { steps: 4 }),
  drag: async ({ x, y, to }) => { await page.mouse.move(x, y); await page.mouse.down(); await page.mouse.move(to, y, { steps: 20 }); await page.mouse.up(); },
  wheel: async ({ x, y, by }) => { await page.mouse.move(x, y); await page.mouse.wheel(0, by); },
  complaints: async () => ({ complaints, requests }),
  picture: async ({ path, width, height }) => { await page.setViewportSize({ width, height }); await page.waitForTimeout(400); await page.screenshot({ path }); },
};
for await (const line of createInterface({ input: process.stdin })) {
  const order = JSON.parse(line);
  try {
    console.log(JSON.stringify({ value: (await orders[order.do](order)) ?? null }));
  } catch (error) {
    console.log(JSON.stringify({ error: String(error) }));
  }
}
await browser.close();
