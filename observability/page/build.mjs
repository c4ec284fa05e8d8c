// Checks the types of the page and bundles it: node build.mjs OUT, in a folder with node_modules.
import { execFileSync } from 'node:child_process';
import { cpSync } from 'node:fs';

import { build } from 'esbuild';

const out = process.argv[2];
execFileSync(process.execPath, ['node_modules/typescript/bin/tsc', '--project', '.'], { stdio: 'inherit' });
await build({
  entryPoints: ['src/main.tsx'],
  outdir: out,
  bundle: true,
  minify: true,
  splitting: true,
  format: 'esm',
  target: 'chrome120',
  loader: { '.ttf': 'empty' },
  define: { 'process.env.NODE_ENV': '"production"' },
  logLevel: 'warning',
});
cpSync('src/index.html', `${out}/index.html`);
cpSync('node_modules/@grafana/ui/dist/public', `${out}/public/build`, { recursive: true });
// Where the styles of the library look for what Grafana's server has.
for (const [name, weight] of [['Regular', 400], ['Medium', 500]]) {
  cpSync(`node_modules/@fontsource/inter/files/inter-latin-${weight}-normal.woff2`, `${out}/public/fonts/inter/Inter-${name}.woff2`);
}
