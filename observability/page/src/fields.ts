// Units, thresholds, mappings, colours and overrides, as Grafana's own applyFieldOverrides gives them to fields.
// Owns the list of options that may be set. Rule: values are read by Grafana's processors; this only names them.
import {
  applyFieldOverrides,
  cacheFieldDisplayNames,
  createTheme,
  type DataFrame,
  dataLinksOverrideProcessor,
  displayNameOverrideProcessor,
  FieldConfigOptionsRegistry,
  type FieldConfigPropertyItem,
  type FieldConfigSource,
  identityOverrideProcessor,
  numberOverrideProcessor,
  stringOverrideProcessor,
  thresholdsOverrideProcessor,
  type GrafanaTheme2,
  type InterpolateFunction,
  standardTransformers,
  standardTransformersRegistry,
  transformDataFrame,
  unitOverrideProcessor,
  valueMappingsOverrideProcessor,
} from '@grafana/data';
import { lastValueFrom } from 'rxjs';

import { type PanelJson } from './dashboard';

type Process = FieldConfigPropertyItem['process'];
const STANDARD: Record<string, unknown> = {
  unit: unitOverrideProcessor,
  min: numberOverrideProcessor,
  max: numberOverrideProcessor,
  decimals: numberOverrideProcessor,
  displayName: displayNameOverrideProcessor,
  noValue: stringOverrideProcessor,
  thresholds: thresholdsOverrideProcessor,
  mappings: valueMappingsOverrideProcessor,
  links: dataLinksOverrideProcessor,
  color: identityOverrideProcessor,
  description: stringOverrideProcessor,
};
// What Grafana's panel of graphs starts from, where a dashboard says nothing.
const GRAPH = {
  drawStyle: 'line',
  lineInterpolation: 'linear',
  lineWidth: 1,
  fillOpacity: 0,
  gradientMode: 'none',
  showPoints: 'auto',
  pointSize: 5,
  spanNulls: false,
  axisPlacement: 'auto',
  axisGridShow: true,
  stacking: { mode: 'none', group: 'A' },
  thresholdsStyle: { mode: 'off' },
  hideFrom: { viz: false, legend: false, tooltip: false },
  scaleDistribution: { type: 'linear' },
};

export const theme: GrafanaTheme2 = createTheme({
  colors: { mode: new URLSearchParams(window.location.search).get('theme') === 'light' ? 'light' : 'dark' },
});

// By id, since the library exports some under two names.
const transformers = new Map(Object.values(standardTransformers).map((transformation) => [transformation.id, transformation]));
standardTransformersRegistry.setInit(
  () => [...transformers].map(([id, transformation]) => ({ id, name: id, transformation: async () => transformation, editor: () => null })) as never
);

export async function prepared(panel: PanelJson, frames: DataFrame[], replace: InterpolateFunction): Promise<DataFrame[]> {
  for (const { id } of panel.transformations ?? []) {
    standardTransformersRegistry.get(id); // raises for one that nobody knows
  }
  const transformed = await lastValueFrom(transformDataFrame(panel.transformations ?? [], frames, { interpolate: (text) => text }));
  const source = configured(panel);
  const overridden = applyFieldOverrides({
    data: transformed,
    fieldConfig: source,
    fieldConfigRegistry: registry(source),
    replaceVariables: replace,
    theme,
    timeZone: 'utc',
  });
  cacheFieldDisplayNames(overridden);
  return overridden;
}

export function configured(panel: PanelJson): FieldConfigSource {
  const given = panel.fieldConfig ?? { defaults: {}, overrides: [] };
  const custom = panel.type === 'timeseries' ? { ...GRAPH, ...given.defaults?.custom } : given.defaults?.custom;
  const thresholds = given.defaults?.thresholds ?? { mode: 'absolute', steps: [{ value: -Infinity, color: 'green' }] };
  const color = given.defaults?.color ?? { mode: panel.type === 'timeseries' ? 'palette-classic' : 'thresholds' };
  return {
    defaults: { ...given.defaults, color, custom, thresholds: thresholds as never },
    overrides: given.overrides ?? [],
  };
}

function registry(source: FieldConfigSource): FieldConfigOptionsRegistry {
  const customs = Object.keys(source.defaults.custom ?? {}).concat(
    source.overrides
      .flatMap((rule) => rule.properties.map((property) => property.id))
      .filter((id) => id.startsWith('custom.'))
      .map((id) => id.slice('custom.'.length).split('.')[0])
  );
  return new FieldConfigOptionsRegistry(() => [
    ...Object.entries(STANDARD).map(([id, process]) => option(id, id, process as Process, false)),
    ...[...new Set(customs)].map((name) => option(`custom.${name}`, name, identityOverrideProcessor, true)),
  ]);
}

function option(id: string, path: string, process: Process, isCustom: boolean): FieldConfigPropertyItem {
  const nothing = () => null;
  return { id, path, name: path, process, isCustom, shouldApply: () => true, editor: nothing, override: nothing } as never;
}
