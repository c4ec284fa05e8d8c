"""The operator: does it lead, keep up, reach the API server and receive changes?

Questions of a platform engineer on call, in the order of the rows:
- Is it healthy, in one line?
- Does it keep up with the jobs?
- Does the API server answer, and are requests few?
- Does it receive changes?
- What does it cost?
"""

from typing import Final

from rlhf_common.metrics import operator, process
from rlhf_observability.dashboards.panels import (
    GREEN,
    ORANGE,
    RED,
    Annotation,
    Dashboard,
    PanelUnit,
    Query,
    Row,
    Variable,
    heatmap,
    lines,
    stat,
)
from rlhf_observability.promql import OPERATORS, highest, or_zero, top, total

_FEW: Final = 10
_POD = "{{namespace}}/{{pod}}"
_BY_POD = ("namespace", "pod")
_SILENT: Final = ((None, GREEN), (180, ORANGE), (300, RED))  # seconds; bookmarks come every minute or two

LED: Final = Annotation(
    "Another leader",
    f"changes({highest(OPERATORS.value(operator.LEADER), *_BY_POD)}[1m:]) > 0",
    "{{pod}} began or ceased to lead",
    ORANGE,
)

WELL: Final = Row(
    "Is it well?",
    (
        stat(
            title="Leaders",
            unit=PanelUnit.NUMBER,
            thresholds=((None, RED), (1, GREEN), (2, ORANGE)),
            shows="Processes that reconcile.",
            normal=operator.LEADER.normal,
            cure="0: the pods' log, and rights on the Lease. Several of one release: look at the Lease's holder.",
            queries=(Query(total(OPERATORS.value(operator.LEADER))),),
        ),
        stat(
            title="Jobs that wait",
            unit=PanelUnit.NUMBER,
            shows=operator.QUEUE_DEPTH.meaning,
            normal=operator.QUEUE_DEPTH.normal,
            cure="It grows: reconciles or the API server are slow; controller.concurrency is how many at once.",
            queries=(Query(total(OPERATORS.value(operator.QUEUE_DEPTH))),),
        ),
        stat(
            title="Longest wait",
            unit=PanelUnit.SECONDS,
            thresholds=((None, GREEN), (30, ORANGE), (180, RED)),
            shows=operator.QUEUE_OLDEST.meaning,
            normal=operator.QUEUE_OLDEST.normal,
            cure="Minutes: a reconcile hangs; the pod is restarted by its liveness probe, its log names the job.",
            queries=(Query(highest(OPERATORS.value(operator.QUEUE_OLDEST))),),
        ),
        stat(
            title="Failed reconciles",
            unit=PanelUnit.NUMBER,
            thresholds=((None, GREEN), (1, ORANGE), (100, RED)),
            shows="Reconciles that failed in the time shown.",
            normal=operator.RECONCILE_ERRORS.normal,
            cure="By reason below: UnavailableError is the API server, RefusedError rights, Bug is ours: report it.",
            queries=(Query(or_zero(total(OPERATORS.increase(operator.RECONCILE_ERRORS, "$__range")))),),
        ),
        stat(
            title="Silence of a watch",
            unit=PanelUnit.SECONDS,
            thresholds=_SILENT,
            shows="Time since the most silent watch last heard of the API server.",
            normal=operator.WATCH_ALIVE.normal,
            cure="Above 5 minutes it is blind to a kind: its log, then the API server's; a restart lists anew.",
            queries=(Query(highest(f"time() - {OPERATORS.value(operator.WATCH_ALIVE, resource='!rlhfjobs')}")),),
        ),
        stat(
            title="Unreadable objects",
            unit=PanelUnit.NUMBER,
            thresholds=((None, GREEN), (1, ORANGE)),
            shows=operator.UNREADABLE.meaning,
            normal=operator.UNREADABLE.normal,
            cure="The log names each object and field; somebody wrote it by hand, or another version did.",
            queries=(Query(or_zero(total(OPERATORS.increase(operator.UNREADABLE, "$__range")))),),
        ),
    ),
)
KEEPS_UP: Final = Row(
    "Does it keep up?",
    (
        lines(
            title="Time of a reconcile",
            unit=PanelUnit.SECONDS,
            shows="Median and 99th percentile of the reconciles of five minutes.",
            normal=operator.RECONCILE_SECONDS.normal,
            cure="Slow for all: the API server. The 99th alone: jobs of hundreds of pods that start.",
            queries=(
                Query(OPERATORS.quantile(0.5, operator.RECONCILE_SECONDS, window="5m"), "median"),
                Query(OPERATORS.quantile(0.99, operator.RECONCILE_SECONDS, window="5m"), "99%"),
            ),
        ),
        lines(
            title="Reconciles and errors",
            unit=PanelUnit.PER_SECOND,
            shows="Reconciles a second by how they ended, and errors by reason.",
            normal="a few a second for hundreds of jobs; conflicts are rare, errors none.",
            cure="Many that change nothing: something writes to jobs or pods all the time; see requests.",
            queries=(
                Query(total(OPERATORS.count_rate(operator.RECONCILE_SECONDS), "result"), "{{result}}"),
                Query(
                    or_zero(total(OPERATORS.rate(operator.RECONCILE_ERRORS), "reason"), "reason"), "error: {{reason}}"
                ),
            ),
        ),
        heatmap(
            title="Reconciles by their time",
            unit=PanelUnit.SECONDS,
            shows="How many reconciles took how long.",
            normal="nearly all below a tenth of a second.",
            cure="A band at whole seconds is requests that are throttled or time out.",
            queries=(Query(OPERATORS.buckets(operator.RECONCILE_SECONDS)),),
        ),
    ),
)
REACHES: Final = Row(
    "Does the API server answer?",
    (
        lines(
            title="Requests",
            unit=PanelUnit.PER_SECOND,
            shows="Requests a second by verb and kind, the ten most frequent.",
            normal="few when nothing changes.",
            cure="A kind that is written all the time fights somebody: another controller, or a webhook that edits.",
            queries=(
                Query(
                    top(_FEW, total(OPERATORS.rate(operator.API_REQUESTS), "verb", "resource")), "{{verb}} {{resource}}"
                ),
            ),
        ),
        lines(
            title="Requests that failed",
            unit=PanelUnit.PER_SECOND,
            shows="Answers from 400 on by code and kind, and 0 for none.",
            normal="none; 409 and 404 now and then.",
            cure="403: rights, see the chart's rbac. 429: throttled. 5xx and 0: the API server, or the way to it.",
            queries=(
                Query(
                    or_zero(
                        top(_FEW, total(OPERATORS.rate(operator.API_REQUESTS, code="~0|[45].."), "code", "resource")),
                        "code",
                    ),
                    "{{code}} {{resource}}",
                ),
            ),
        ),
    ),
)
HEARS: Final = Row(
    "Does it hear of changes?",
    (
        lines(
            title="Silence of watches",
            unit=PanelUnit.SECONDS,
            thresholds=_SILENT,
            shows="Time since each watch last heard of the API server, by kind.",
            normal="below 150 s; of rlhfjobs as long as none changes, where no bookmarks come.",
            cure="A line that rises without end is a watch that hangs: restart the operator, keep its log.",
            queries=(Query(f"time() - {highest(OPERATORS.value(operator.WATCH_ALIVE), 'resource')}", "{{resource}}"),),
        ),
        lines(
            title="Time since the last event",
            unit=PanelUnit.SECONDS,
            shows=operator.WATCH_EVENT.meaning,
            normal=operator.WATCH_EVENT.normal,
            cure="Old while `kubectl get -w` of that kind shows changes: the watch is deaf; restart the operator.",
            queries=(Query(f"time() - {highest(OPERATORS.value(operator.WATCH_EVENT), 'resource')}", "{{resource}}"),),
        ),
        lines(
            title="Listings anew",
            unit=PanelUnit.NUMBER,
            shows=operator.WATCH_RELISTS.meaning,
            normal=operator.WATCH_RELISTS.normal,
            cure="Every few minutes: the API server restarts, or its watch cache is too short.",
            queries=(
                Query(
                    or_zero(total(OPERATORS.increase(operator.WATCH_RELISTS), "resource"), "resource"), "{{resource}}"
                ),
            ),
        ),
    ),
)
COSTS: Final = Row(
    "What does it cost?",
    (
        lines(
            title="Memory",
            unit=PanelUnit.BYTES,
            shows="Memory that each of the operator's pods occupies.",
            normal=process.RESIDENT_MEMORY.normal,
            cure="It only rises: a leak; note the number of jobs and report it.",
            queries=(Query(highest(OPERATORS.value(process.RESIDENT_MEMORY), *_BY_POD), _POD),),
        ),
        lines(
            title="Processor",
            unit=PanelUnit.NUMBER,
            shows="Cores that each of the operator's pods uses.",
            normal=process.CPU_SECONDS.normal,
            cure="At one core with a queue: more operators, each with its own operatorClass or namespaces.",
            queries=(Query(total(OPERATORS.rate(process.CPU_SECONDS), *_BY_POD), _POD),),
        ),
    ),
)
OPERATOR_DASHBOARD: Final = Dashboard(
    "rlhf-operator",
    "RLHF / Operator",
    "Does the operator lead, keep up, reach the API server and hear of changes?",
    (WELL, KEEPS_UP, REACHES, HEARS, COSTS),
    variables=(Variable.CLUSTER,),
    annotations=(LED,),
    since="now-6h",
)
