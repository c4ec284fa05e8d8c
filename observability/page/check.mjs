// Holds dashboards to Grafana's own schema: node check.mjs FILE..., in a folder with node_modules.
// Each file becomes a literal of the types of @grafana/schema, which TypeScript judges: a field that Grafana does not know, a
// value that it does not have, or one of the wrong kind is told with its place; so are options of a panel's own kind.
import { execFileSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { basename, join } from 'node:path';

const RAW = '../node_modules/@grafana/schema/dist/types/raw';
const KINDS = { timeseries: 'timeseries', stat: 'stat', bargauge: 'bargauge', table: 'table', heatmap: 'heatmap', 'state-timeline': 'statetimeline' };
// In a file an enumeration is its value, and what is left out has the default of the panel's plugin.
const HEADER = `
type Plain<T> = T extends string ? \`\${T}\` : T extends Array<infer E> ? Array<Plain<E>> : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
// What an annotation asks is its datasource's own; these are what that of Prometheus reads.
type Marks = AnnotationQuery & { expr: string; step?: string; titleFormat?: string };
type File = Omit<Dashboard, 'annotations'> & { annotations?: { list: Marks[] } };
type Given<T> = T extends Array<infer E> ? Array<Given<E>> : T extends object ? { [K in keyof T]?: Given<T[K]> } : T;
`;

const folder = mkdtempSync('check-');
try {
  const files = process.argv.slice(2).map((path) => write(path));
  writeFileSync(join(folder, 'tsconfig.json'), JSON.stringify({ extends: '../tsconfig.json', compilerOptions: { noUnusedLocals: false }, include: [], files }));
  execFileSync(process.execPath, ['node_modules/typescript/bin/tsc', '--project', folder], { stdio: 'inherit' });
} finally {
  rmSync(folder, { recursive: true });
}

function write(path) {
  const dashboard = JSON.parse(readFileSync(path, 'utf8'));
  const lines = [
    `import type { AnnotationQuery, Dashboard } from '${RAW}/dashboard/x/types.gen';`,
    ...Object.values(KINDS).map((kind) => `import type { Options as ${kind} } from '${RAW}/composable/${kind}/panelcfg/x/types.gen';`),
    HEADER,
    `export const dashboard = ${JSON.stringify(dashboard, null, 1)} satisfies Plain<File>;`,
  ];
  for (const panel of dashboard.panels.filter(({ type }) => type !== 'row')) {
    const kind = KINDS[panel.type] ?? unknown(path, panel);
    lines.push(`// ${panel.title}`, `export const panel${panel.id} = ${JSON.stringify(panel.options ?? {}, null, 1)} satisfies Given<Plain<${kind}>>;`);
  }
  const name = `${basename(path, '.json')}.ts`;
  writeFileSync(join(folder, name), lines.join('\n'));
  return name;
}

function unknown(path, panel) {
  throw new Error(`${path}: panel ${panel.title}: no schema is known of type ${panel.type}`);
}
