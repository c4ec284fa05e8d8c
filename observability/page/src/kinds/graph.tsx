// Lines, areas and stacks over time: Grafana's own TimeSeries, with annotations painted over it.
import { TimeSeries } from '@grafana/ui';
import { type JSX } from 'react';

import { theme } from '../fields';
import { type KindProps, type Mark } from './kind';

type Builder = Parameters<NonNullable<Parameters<typeof TimeSeries>[0]['children']>>[0];
const LEGEND = { displayMode: 'list', placement: 'bottom', showLegend: true, calcs: [] };

export function Graph({ panel, frames, width, height, range, marks }: KindProps): JSX.Element {
  return (
    <TimeSeries
      frames={frames}
      width={width}
      height={height}
      timeRange={range}
      timeZone="utc"
      legend={{ ...LEGEND, ...panel.options?.legend }}
      options={panel.options}
    >
      {(builder) => <Marks builder={builder} marks={marks} />}
    </TimeSeries>
  );
}

function Marks({ builder, marks }: { builder: Builder; marks: Mark[] }): null {
  builder.addHook('draw', (plot) => {
    const { left, top, width, height } = plot.bbox;
    plot.ctx.save();
    plot.ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const { time, color } of marks) {
      const x = Math.round(plot.valToPos(time, 'x', true));
      if (x >= left && x <= left + width) {
        plot.ctx.strokeStyle = theme.visualization.getColorByName(color);
        plot.ctx.beginPath();
        plot.ctx.moveTo(x, top);
        plot.ctx.lineTo(x, top + height);
        plot.ctx.stroke();
      }
    }
    plot.ctx.restore();
  });
  return null;
}
