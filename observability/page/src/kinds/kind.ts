// What every kind of panel is given.
import { type DataFrame, type InterpolateFunction, type TimeRange } from '@grafana/data';

import { type PanelJson } from '../dashboard';

export interface Mark {
  time: number; // milliseconds since 1970
  color: string;
}

export interface KindProps {
  panel: PanelJson;
  frames: DataFrame[];
  width: number;
  height: number;
  range: TimeRange;
  replace: InterpolateFunction;
  marks: Mark[]; // annotations
}
