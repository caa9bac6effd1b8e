{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}
{{- define "kvrouter.name" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- /* The names by which clients reach the routers. */ -}}
{{- define "kvrouter.hosts" -}}
{{- $name := include "kvrouter.name" . -}}
{{- $service := printf "%s.%s" $name .Release.Namespace -}}
{{ $name }} {{ $service }} {{ $service }}.svc {{ $service }}.svc.{{ .Values.service.clusterDomain }}
{{- range .Values.service.hosts }} {{ . }}{{ end }}
{{- end -}}

{{- define "kvrouter.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- /* By which the objects of a release are selected; `of` is router, store or engine. */ -}}
{{- define "kvrouter.selectorLabels" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .of }}
{{- end -}}

{{- define "kvrouter.labels" -}}
{{ include "kvrouter.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- define "kvrouter.engineSelector" -}}
{{- if .Values.discovery.selector -}}
{{ .Values.discovery.selector }}
{{- else if .Values.engine.enabled -}}
app.kubernetes.io/component=engine,app.kubernetes.io/instance={{ .Release.Name }}
{{- else -}}
app.kubernetes.io/component=engine
{{- end -}}
{{- end -}}

{{- /* The engines' labels as a map; `given` wins, `value` is its name. */ -}}
{{- define "kvrouter.engineLabels" -}}
{{- if .given -}}
{{ toYaml .given }}
{{- else -}}
{{- $selector := include "kvrouter.engineSelector" .root -}}
{{- range splitList "," $selector -}}
{{- $pair := splitList "=" (. | replace "==" "=") -}}
{{- if or (ne (len $pair) 2) (contains "!" (first $pair)) -}}
{{- fail (printf "discovery.selector %q is more than labels that must all match: set %s, too" $selector $.value) -}}
{{- end }}
{{ first $pair | trim }}: {{ last $pair | trim | quote }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvrouter.engineNamespace" -}}
{{ .Values.discovery.namespace | default .Release.Namespace }}
{{- end -}}

{{- define "kvrouter.bundledStore" -}}
{{- if not (or .Values.store.url .Values.store.secret) -}}
{{- if .Values.store.valkey.enabled -}}
yes
{{- else -}}
{{- fail "no store: several routers need one Redis or Valkey; set store.url, store.secret or store.valkey.enabled" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* A setting's value as the environment has it: whole numbers without an exponent, lists with spaces. */ -}}
{{- define "kvrouter.setting" -}}
{{- if kindIs "slice" . -}}
{{ join " " . }}
{{- else if kindIs "bool" . -}}
{{ ternary "on" "off" . }}
{{- else if and (kindIs "float64" .) (eq (float64 (int64 .)) .) -}}
{{ int64 . }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}

{{- define "kvrouter.priorityClassName" -}}
{{- if .Values.priorityClass.create -}}
{{ .Values.priorityClass.name | default (include "kvrouter.name" .) }}
{{- else -}}
{{ .Values.priorityClass.name }}
{{- end -}}
{{- end -}}

{{- define "kvrouter.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kvrouter.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
