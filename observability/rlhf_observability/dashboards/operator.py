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
    "Is the operator healthy?",
    (
        stat(
            title="Leaders",
            unit=PanelUnit.NUMBER,
            thresholds=((None, RED), (1, GREEN), (2, ORANGE)),
            shows="Number of processes that reconcile.",
            normal=operator.LEADER.normal,
            cure="At 0, check the log of the pods and their rights on the Lease. If one release has several, check "
            "the holder of the Lease.",
            queries=(Query(total(OPERATORS.value(operator.LEADER))),),
        ),
        stat(
            title="Waiting jobs",
            unit=PanelUnit.NUMBER,
            shows=operator.QUEUE_DEPTH.meaning,
            normal=operator.QUEUE_DEPTH.normal,
            cure="If it grows, reconciles or the API server are slow. controller.concurrency is the number of "
            "concurrent reconciles.",
            queries=(Query(total(OPERATORS.value(operator.QUEUE_DEPTH))),),
        ),
        stat(
            title="Longest wait",
            unit=PanelUnit.SECONDS,
            thresholds=((None, GREEN), (30, ORANGE), (180, RED)),
            shows=operator.QUEUE_OLDEST.meaning,
            normal=operator.QUEUE_OLDEST.normal,
            cure="If it is minutes, a reconcile hangs. The liveness probe restarts the pod; its log names the job.",
            queries=(Query(highest(OPERATORS.value(operator.QUEUE_OLDEST))),),
        ),
        stat(
            title="Failed reconciles",
            unit=PanelUnit.NUMBER,
            thresholds=((None, GREEN), (1, ORANGE), (100, RED)),
            shows="Failed reconciles in the chosen time.",
            normal=operator.RECONCILE_ERRORS.normal,
            cure="The reason is below. UnavailableError: the API server does not answer. RefusedError: rights are "
            "missing. Bug: report it.",
            queries=(Query(or_zero(total(OPERATORS.increase(operator.RECONCILE_ERRORS, "$__range")))),),
        ),
        stat(
            title="Silence of a watch",
            unit=PanelUnit.SECONDS,
            thresholds=_SILENT,
            shows="Time since the last message of the API server in the most silent watch.",
            normal=operator.WATCH_ALIVE.normal,
            cure="Above 5 minutes, the operator misses changes of one kind. Check its log, then the log of the API "
            "server. A restart lists all objects again.",
            queries=(Query(highest(f"time() - {OPERATORS.value(operator.WATCH_ALIVE, resource='!rlhfjobs')}")),),
        ),
        stat(
            title="Unreadable objects",
            unit=PanelUnit.NUMBER,
            thresholds=((None, GREEN), (1, ORANGE)),
            shows=operator.UNREADABLE.meaning,
            normal=operator.UNREADABLE.normal,
            cure="The log names each object and field. Somebody wrote the object by hand, or another version wrote it.",
            queries=(Query(or_zero(total(OPERATORS.increase(operator.UNREADABLE, "$__range")))),),
        ),
    ),
)
KEEPS_UP: Final = Row(
    "Does the operator keep up?",
    (
        lines(
            title="Time of a reconcile",
            unit=PanelUnit.SECONDS,
            shows="Median and 99th percentile of the time of reconciles within five minutes.",
            normal=operator.RECONCILE_SECONDS.normal,
            cure="If all are slow, the API server is slow. If the 99th percentile alone is high, jobs with hundreds "
            "of pods start.",
            queries=(
                Query(OPERATORS.quantile(0.5, operator.RECONCILE_SECONDS, window="5m"), "median"),
                Query(OPERATORS.quantile(0.99, operator.RECONCILE_SECONDS, window="5m"), "99%"),
            ),
        ),
        lines(
            title="Reconciles and errors",
            unit=PanelUnit.PER_SECOND,
            shows="Reconciles per second by result, and errors by reason.",
            normal="a few per second for hundreds of jobs; conflicts are rare, and errors are 0.",
            cure="If many reconciles change nothing, another program writes to jobs or pods all the time: check the "
            "requests.",
            queries=(
                Query(total(OPERATORS.count_rate(operator.RECONCILE_SECONDS), "result"), "{{result}}"),
                Query(
                    or_zero(total(OPERATORS.rate(operator.RECONCILE_ERRORS), "reason"), "reason"), "error: {{reason}}"
                ),
            ),
        ),
        heatmap(
            title="Reconciles by duration",
            unit=PanelUnit.SECONDS,
            shows="Distribution of the time of reconciles.",
            normal="nearly all are below a tenth of a second.",
            cure="A band at whole seconds means that the API server throttles requests, or that requests time out.",
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
            shows="Requests per second of the ten most frequent pairs of verb and kind.",
            normal="few while nothing changes.",
            cure="If the operator writes one kind all the time, another controller or a webhook changes the same "
            "objects.",
            queries=(
                Query(
                    top(_FEW, total(OPERATORS.rate(operator.API_REQUESTS), "verb", "resource")), "{{verb}} {{resource}}"
                ),
            ),
        ),
        lines(
            title="Failed requests",
            unit=PanelUnit.PER_SECOND,
            shows="Answers with a status code from 400, by code and kind; code 0 means no answer.",
            normal="0, except 409 and 404 at times.",
            cure="403: rights are missing, see the chart's rbac. 429: the API server throttles. 5xx and 0: check the "
            "API server and the connection to it.",
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
    "Does the operator receive changes?",
    (
        lines(
            title="Silence of watches",
            unit=PanelUnit.SECONDS,
            thresholds=_SILENT,
            shows="Time since the last message of the API server in each watch, by kind.",
            normal="below 150 s; for rlhfjobs the time since the last change, if the API server sends no bookmarks.",
            cure="If a line rises without end, a watch hangs: save the log and restart the operator.",
            queries=(Query(f"time() - {highest(OPERATORS.value(operator.WATCH_ALIVE), 'resource')}", "{{resource}}"),),
        ),
        lines(
            title="Time since the last event",
            unit=PanelUnit.SECONDS,
            shows=operator.WATCH_EVENT.meaning,
            normal=operator.WATCH_EVENT.normal,
            cure="If `kubectl get -w` of that kind shows newer changes, the watch receives nothing: restart the "
            "operator.",
            queries=(Query(f"time() - {highest(OPERATORS.value(operator.WATCH_EVENT), 'resource')}", "{{resource}}"),),
        ),
        lines(
            title="Repeated listings",
            unit=PanelUnit.NUMBER,
            shows=operator.WATCH_RELISTS.meaning,
            normal=operator.WATCH_RELISTS.normal,
            cure="If they come every few minutes, the API server restarts, or its watch cache is too short.",
            queries=(
                Query(
                    or_zero(total(OPERATORS.increase(operator.WATCH_RELISTS), "resource"), "resource"), "{{resource}}"
                ),
            ),
        ),
    ),
)
COSTS: Final = Row(
    "How much memory and CPU time does the operator use?",
    (
        lines(
            title="Memory",
            unit=PanelUnit.BYTES,
            shows="Resident memory of each operator pod.",
            normal=process.RESIDENT_MEMORY.normal,
            cure="If it only rises, memory leaks: report it with the number of jobs.",
            queries=(Query(highest(OPERATORS.value(process.RESIDENT_MEMORY), *_BY_POD), _POD),),
        ),
        lines(
            title="CPU",
            unit=PanelUnit.NUMBER,
            shows="Cores that each operator pod uses.",
            normal=process.CPU_SECONDS.normal,
            cure="At one core with a queue, use several operators, each with its own operatorClass or namespaces.",
            queries=(Query(total(OPERATORS.rate(process.CPU_SECONDS), *_BY_POD), _POD),),
        ),
    ),
)
OPERATOR_DASHBOARD: Final = Dashboard(
    "rlhf-operator",
    "RLHF / Operator",
    "Does the operator lead, keep up, reach the API server and receive changes?",
    (WELL, KEEPS_UP, REACHES, HEARS, COSTS),
    variables=(Variable.CLUSTER,),
    annotations=(LED,),
    since="now-6h",
)
