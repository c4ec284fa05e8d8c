// One panel: its questions to Prometheus, what becomes of the answers, and the box it is drawn in.
// Rule: a panel ends in one of three states that a test reads from its element: data, nothing, or an error with its words.
import { type DataFrame, type InterpolateFunction, LoadingState, type TimeRange } from '@grafana/data';
import { ErrorBoundary, PanelChrome } from '@grafana/ui';
import { type ComponentType, type JSX, useEffect, useState } from 'react';

import { type PanelJson } from './dashboard';
import { prepared } from './fields';
import { Graph } from './kinds/graph';
import { Heatmap } from './kinds/heatmap';
import { type KindProps, type Mark } from './kinds/kind';
import { States } from './kinds/states';
import { Rows } from './kinds/table';
import { Bars, BigValues } from './kinds/values';
import { frames, type Moment } from './prometheus';
import { type Chosen, interpolate } from './variables';

const KINDS: Record<string, ComponentType<KindProps>> = {
  timeseries: Graph,
  stat: BigValues,
  bargauge: Bars,
  table: Rows,
  heatmap: Heatmap,
  'state-timeline': States,
};

export interface PanelProps {
  panel: PanelJson;
  chosen: Chosen[];
  when: Moment;
  range: TimeRange;
  width: number;
  height: number;
  marks: Mark[];
}

type State = { name: 'loading' | 'data' | 'nothing' | 'error'; frames: DataFrame[]; words: string };

export function Panel({ panel, chosen, when, range, width, height, marks }: PanelProps): JSX.Element {
  const [state, setState] = useState<State>({ name: 'loading', frames: [], words: '' });
  const replace: InterpolateFunction = (text, scoped) => interpolate(text ?? '', chosen, when, scoped);
  useEffect(() => {
    answers(panel, chosen, when, replace).then(setState, (error) => setState(failed(error)));
  }, []);
  const Kind = KINDS[panel.type];
  return (
    <div data-panel={panel.id} data-title={panel.title} data-state={state.name} data-words={state.words}>
      <PanelChrome
        title={panel.title}
        description={panel.description}
        width={width}
        height={height}
        padding={panel.type === 'table' ? 'none' : 'md'}
        statusMessage={state.name === 'error' ? state.words : undefined}
        loadingState={state.name === 'error' ? LoadingState.Error : LoadingState.Done}
      >
        {(innerWidth, innerHeight) => (
          <ErrorBoundary onError={(error) => setState(failed(error))}>
            {({ error }) => {
              if (error || state.name !== 'data') {
                return <div className="words">{state.name === 'nothing' ? 'No data' : state.words}</div>;
              }
              return <Kind {...{ panel, range, replace, marks, frames: state.frames }} width={innerWidth} height={innerHeight} />;
            }}
          </ErrorBoundary>
        )}
      </PanelChrome>
    </div>
  );
}

async function answers(panel: PanelJson, chosen: Chosen[], when: Moment, replace: InterpolateFunction): Promise<State> {
  if (!(panel.type in KINDS)) {
    throw new Error(`panels of type ${panel.type} are not drawn; known: ${Object.keys(KINDS).join(', ')}`);
  }
  const targets = (panel.targets ?? []).filter((target) => !target.hide);
  const found = await Promise.all(targets.map((target) => frames(target, interpolate(target.expr, chosen, when), when)));
  const given = found.flat().filter((frame) => frame.length > 0);
  if (!given.length) {
    return { name: 'nothing', frames: [], words: '' };
  }
  return { name: 'data', frames: await prepared(panel, given, replace), words: '' };
}

function failed(error: Error): State {
  return { name: 'error', frames: [], words: String(error.message ?? error) };
}
