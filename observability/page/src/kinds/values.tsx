// Big values and bars: Grafana's own BigValue and BarGauge, of the values that its getFieldDisplayValues reduces series to.
import { type FieldDisplay, getDisplayValueAlignmentFactors, getFieldDisplayValues, VizOrientation } from '@grafana/data';
import { BarGauge, BarGaugeDisplayMode, BigValue, BigValueColorMode, BigValueGraphMode, BigValueTextMode, VizRepeater } from '@grafana/ui';
import { type JSX } from 'react';

import { configured, theme } from '../fields';
import { type KindProps } from './kind';

function values({ panel, frames, replace }: KindProps, sparkline: boolean): FieldDisplay[] {
  return getFieldDisplayValues({
    data: frames,
    reduceOptions: panel.options?.reduceOptions ?? { calcs: ['lastNotNull'] },
    fieldConfig: configured(panel),
    replaceVariables: replace,
    sparkline,
    theme,
    timeZone: 'utc',
  });
}

export function BigValues(props: KindProps): JSX.Element {
  const { panel, width, height } = props;
  const options = panel.options ?? {};
  const sparkline = (options.graphMode ?? 'area') !== 'none';
  return (
    <VizRepeater<FieldDisplay>
      getValues={() => values(props, sparkline)}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      source={props.frames}
      renderCounter={0}
      width={width}
      height={height}
      orientation={options.orientation ?? VizOrientation.Auto}
      autoGrid
      itemSpacing={3}
      renderValue={({ value, width, height, count, alignmentFactors }) => (
        <BigValue
          value={value.display}
          sparkline={value.sparkline}
          width={width}
          height={height}
          count={count}
          alignmentFactors={alignmentFactors as never}
          colorMode={options.colorMode ?? BigValueColorMode.Value}
          graphMode={options.graphMode ?? BigValueGraphMode.Area}
          justifyMode={options.justifyMode}
          textMode={options.textMode ?? BigValueTextMode.Auto}
          text={options.text}
          theme={theme}
        />
      )}
    />
  );
}

export function Bars(props: KindProps): JSX.Element {
  const { panel, width, height } = props;
  const options = panel.options ?? {};
  const manual = options.sizing === 'manual';
  const orientation = options.orientation === 'vertical' ? VizOrientation.Vertical : VizOrientation.Horizontal;
  return (
    <VizRepeater<FieldDisplay>
      getValues={() => values(props, false)}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      source={props.frames}
      renderCounter={0}
      width={width}
      height={height}
      orientation={orientation}
      itemSpacing={8}
      minVizHeight={manual ? options.minVizHeight : 16}
      minVizWidth={manual ? options.minVizWidth : 8}
      maxVizHeight={manual ? options.maxVizHeight : 300}
      renderValue={({ value, width, height, alignmentFactors }) => (
        <BarGauge
          value={value.display}
          field={value.field}
          display={value.view?.getFieldDisplayProcessor(value.colIndex ?? 0)}
          width={width}
          height={height}
          orientation={orientation}
          alignmentFactors={alignmentFactors as never}
          displayMode={options.displayMode ?? BarGaugeDisplayMode.Gradient}
          valueDisplayMode={options.valueMode}
          showUnfilled={options.showUnfilled ?? true}
          namePlacement={options.namePlacement}
          text={options.text}
          theme={theme}
        />
      )}
    />
  );
}
