// The page of one dashboard: `?dashboard=UID`, and optionally from, to, theme, width, scrape (seconds) and var-NAME.
// Owns the grid, the line of variables, and the two marks that a driver of the browser waits for: data-done and data-error.
import 'uplot/dist/uPlot.min.css';

import { dateTime, type TimeRange } from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';
import { GlobalStyles, PortalContainer } from '@grafana/ui';
import { type JSX, useEffect, useState } from 'react';
import { createRoot } from 'react-dom/client';

import { type AnnotationJson, type DashboardJson, type PanelJson } from './dashboard';
import { theme } from './fields';
import { type Mark } from './kinds/kind';
import { Panel } from './panel';
import { frames, type Moment } from './prometheus';
import { choose, type Chosen, interpolate, moment } from './variables';

const COLUMNS = 24;
const CELL = 30; // pixels of height of one row of Grafana's grid
const GAP = 8; // pixels between panels
const ROW_HEADING = 34;
const CONTINUED = 1500; // milliseconds for each second of step, within which two marks are one
const address = new URLSearchParams(window.location.search);
const WIDTH = Number(address.get('width') ?? '1600');

interface Loaded {
  dashboard: DashboardJson;
  chosen: Chosen[];
  when: Moment;
  marks: Mark[];
}

function place(panel: PanelJson): { left: number; top: number; width: number; height: number } {
  const column = (WIDTH - GAP) / COLUMNS;
  const { x, y, w, h } = panel.gridPos;
  return {
    left: GAP + x * column,
    top: y * (CELL + GAP),
    width: w * column - GAP,
    height: panel.type === 'row' ? ROW_HEADING : h * (CELL + GAP) - GAP,
  };
}

function Page({ dashboard, chosen, when, marks }: Loaded): JSX.Element {
  const range: TimeRange = {
    from: dateTime(when.from * 1000),
    to: dateTime(when.to * 1000),
    raw: { from: dateTime(when.from * 1000), to: dateTime(when.to * 1000) },
  };
  const [pending, setPending] = useState(true);
  useEffect(() => {
    const look = setInterval(() => {
      if (!document.querySelector('[data-state="loading"]')) {
        setPending(false);
      }
    }, 100);
    return () => clearInterval(look);
  }, []);
  const bottom = Math.max(...dashboard.panels.map((panel) => place(panel).top + place(panel).height));
  return (
    <div id="dashboard" data-done={!pending} style={{ width: WIDTH }}>
      <h1>{dashboard.title}</h1>
      <div id="variables">
        {chosen.map(({ name, label, text }) => (
          <span key={name}>
            <b>{label}</b>
            {text}
          </span>
        ))}
      </div>
      <div style={{ position: 'relative', height: bottom + GAP }}>
        {dashboard.panels.map((panel) => {
          const { left, top, width, height } = place(panel);
          return (
            <div key={panel.id} style={{ position: 'absolute', left, top, width, height }}>
              {panel.type === 'row' ? <h2>{panel.title}</h2> : <Panel {...{ panel, chosen, when, range, width, height, marks }} />}
            </div>
          );
        })}
      </div>
    </div>
  );
}

async function marked(annotations: AnnotationJson[], chosen: Chosen[], when: Moment): Promise<Mark[]> {
  const wanted = annotations.filter((annotation) => annotation.enable && annotation.expr);
  const found = await Promise.all(
    wanted.map(async ({ expr, iconColor }) => {
      const series = await frames({ refId: 'marks', expr: expr! }, interpolate(expr!, chosen, when), when);
      return series.flatMap(({ fields: [times, values] }) => {
        const marked: number[] = times.values.filter((_, index) => values.values[index] > 0);
        // What goes on is one mark, where it began.
        const begun = marked.filter((time, index) => !index || time - marked[index - 1] > when.step * CONTINUED);
        return begun.map((time) => ({ time, color: iconColor }));
      });
    })
  );
  return found.flat();
}

async function load(): Promise<Loaded> {
  await initPluginTranslations('grafana');
  const answer = await fetch(`/dashboards/${address.get('dashboard')}.json`);
  if (!answer.ok) {
    throw new Error(`no dashboard ${address.get('dashboard')}: ${answer.status}`);
  }
  const dashboard: DashboardJson = await answer.json();
  const when = moment(address.get('from') ?? dashboard.time.from, address.get('to') ?? dashboard.time.to);
  const chosen = await choose(dashboard, when);
  return { dashboard, chosen, when, marks: await marked(dashboard.annotations?.list ?? [], chosen, when) };
}

const root = createRoot(document.getElementById('root')!);
load().then(
  (loaded) =>
    root.render(
      <>
        <GlobalStyles />
        <Page {...loaded} />
        <PortalContainer />
      </>
    ),
  (error) => {
    document.body.dataset.error = String(error.message ?? error);
    document.body.textContent = document.body.dataset.error;
  }
);
document.body.style.background = theme.colors.background.canvas;
