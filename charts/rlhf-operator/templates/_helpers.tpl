{{- define "rlhf-operator.fullname" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end }}

{{- define "rlhf-operator.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "rlhf-operator.fullname" .) -}}
{{- end }}

{{/* The NetworkPolicy of every job lets the operator in by the first and the last of these labels. */}}
{{- define "rlhf-operator.selector" -}}
app.kubernetes.io/name: rlhf-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "rlhf-operator.labels" -}}
{{- include "rlhf-operator.free" (dict "field" "commonLabels" "labels" .Values.commonLabels) -}}
{{- $fixed := include "rlhf-operator.selector" . | fromYaml -}}
{{- $_ := set $fixed "app.kubernetes.io/version" .Chart.AppVersion -}}
{{- $_ := set $fixed "app.kubernetes.io/managed-by" .Release.Service -}}
{{- $_ := set $fixed "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_") -}}
{{- toYaml (mergeOverwrite (deepCopy .Values.commonLabels) $fixed) -}}
{{- end }}

{{/* The user of all pods as the operator's flag takes it: helm drops a null, and --reuse-values brings no podSecurity. */}}
{{- define "rlhf-operator.user" -}}
{{- if not (hasKey .Values "podSecurity") -}}
10001
{{- else if .Values.podSecurity.runAsUser -}}
{{ int64 .Values.podSecurity.runAsUser }}
{{- else -}}
none
{{- end -}}
{{- end }}

{{/* Refuses labels of the user by which the chart, the operator or a controller of the cluster finds objects:
(dict "field" "controller.podLabels" "labels" .Values.controller.podLabels). */}}
{{- define "rlhf-operator.free" -}}
{{- $own := list "name" "instance" "component" "version" "managed-by" -}}
{{- range $name, $value := .labels -}}
{{- $taken := or (hasPrefix "rlhf.dev/" $name) (has $name (list "helm.sh/chart" "pod-template-hash")) -}}
{{- if or $taken (and (hasPrefix "app.kubernetes.io/" $name) (has (trimPrefix "app.kubernetes.io/" $name) $own)) -}}
{{- printf "%s: %s: is set by the chart or the cluster, which find objects by it: choose another name" $.field $name | fail -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Reference of an image: (dict "root" $ "image" .Values.image.operator). */}}
{{- define "rlhf-operator.image" -}}
{{- $place := printf "%s/%s" .root.Values.image.registry .image.repository | trimPrefix "/" -}}
{{- if .image.digest -}}
{{ $place }}@{{ .image.digest }}
{{- else -}}
{{ $place }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* "true" where Kueue is used: Auto is yes where the cluster serves its API when the chart is rendered. */}}
{{- define "rlhf-operator.kueue" -}}
{{- $asked := (default dict .Values.scheduling).kueue -}}
{{- $serves := or (.Capabilities.APIVersions.Has "kueue.x-k8s.io/v1beta2") (.Capabilities.APIVersions.Has "kueue.x-k8s.io/v1beta1") -}}
{{- if or (and (kindIs "bool" $asked) $asked) (and (eq (toString $asked) "Auto") $serves) -}}true{{- end -}}
{{- end }}

{{/* Names of the backends that are switched on, as the operator's flag takes them. */}}
{{- define "rlhf-operator.scheduling" -}}
{{- $on := list -}}
{{- /* helm upgrade --reuse-values brings the values of a chart that did not know these. */ -}}
{{- $asked := default dict .Values.scheduling -}}
{{- range tuple "Native" "Kueue" "Volcano" "Coscheduling" -}}
{{- $used := index $asked (lower .) -}}
{{- if eq . "Kueue" -}}{{- $used = include "rlhf-operator.kueue" $ -}}{{- end -}}
{{- if $used -}}{{- $on = append $on . -}}{{- end -}}
{{- end -}}
{{- join "," $on -}}
{{- end }}

{{/* What the operator may do where it reconciles; docs/operations.md and the chart's tests hold the same list. */}}
{{- define "rlhf-operator.rules" -}}
- apiGroups: [rlhf.dev]
  resources: [rlhfjobs]
  verbs: [get, list, watch, patch, delete]
- apiGroups: [rlhf.dev]
  resources: [rlhfjobs/status]
  verbs: [patch]
# Children block their job's deletion; OwnerReferencesPermissionEnforcement (OpenShift has it on) asks for this.
- apiGroups: [rlhf.dev]
  resources: [rlhfjobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, watch, create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch]
# By name, never listed.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- with .Values.scheduling }}
{{- if .native }}
- apiGroups: [scheduling.k8s.io]
  resources: [workloads, podgroups]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if include "rlhf-operator.kueue" $ }}
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [update]
{{- end }}
{{- if .volcano }}
- apiGroups: [scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .coscheduling }}
- apiGroups: [scheduling.x-k8s.io]
  resources: [podgroups]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- end }}
{{- end }}
