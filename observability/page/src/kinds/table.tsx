// A table: Grafana's own, of the one frame that its transformations leave.
import { TableNG } from '@grafana/ui/unstable';
import { type JSX } from 'react';

import { type KindProps } from './kind';

export function Rows({ panel, frames, width, height, range }: KindProps): JSX.Element {
  if (frames.length > 1) {
    throw new Error(`${frames.length} frames for one table: join them by a transformation`);
  }
  const options = panel.options ?? {};
  return (
    <TableNG
      data={frames[0]}
      width={width}
      height={height}
      timeRange={range}
      noHeader={options.showHeader === false}
      cellHeight={options.cellHeight}
      sortBy={options.sortBy}
      enableVirtualization={false}
      fieldConfig={panel.fieldConfig}
    />
  );
}
