// The parts of a dashboard's JSON that the page draws by, with Grafana's own types for field configuration.
// Rule: what is absent has the default that Grafana gives it; what the page cannot draw is an error and never left out.
import { type DataTransformerConfig, type FieldConfigSource } from '@grafana/data';

export interface Target {
  refId: string;
  expr: string;
  legendFormat?: string;
  instant?: boolean;
  format?: 'time_series' | 'table' | 'heatmap';
  hide?: boolean;
}

export interface PanelJson {
  id: number;
  type: string;
  title: string;
  description?: string;
  gridPos: { x: number; y: number; w: number; h: number };
  targets?: Target[];
  transformations?: DataTransformerConfig[];
  fieldConfig?: FieldConfigSource;
  options?: Record<string, any>;
  interval?: string;
  panels?: PanelJson[];
}

export interface VariableJson {
  name: string;
  type: string;
  label?: string;
  query?: string | { query: string };
  allValue?: string;
  includeAll?: boolean;
  multi?: boolean;
}

export interface AnnotationJson {
  name: string;
  expr?: string;
  iconColor: string;
  enable: boolean;
  step?: string;
  titleFormat?: string;
}

export interface DashboardJson {
  uid: string;
  title: string;
  time: { from: string; to: string };
  panels: PanelJson[];
  templating?: { list: VariableJson[] };
  annotations?: { list: AnnotationJson[] };
}

// Panels in the order of the page, those of collapsed rows included.
export function allPanels(dashboard: DashboardJson): PanelJson[] {
  return dashboard.panels.flatMap((panel) => [panel, ...(panel.panels ?? [])]);
}
