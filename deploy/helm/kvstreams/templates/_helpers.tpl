{{/* Names. Suffixes such as -bridge-NAME follow, and a name of a service has at most 63 characters. */}}
{{- define "kvstreams.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvstreams.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "kvstreams.name" . -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvstreams.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels that select the pods of a component. Argument: root, component. */}}
{{- define "kvstreams.selector" -}}
app.kubernetes.io/name: {{ include "kvstreams.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of every object. Argument: root, component. */}}
{{- define "kvstreams.labels" -}}
{{ include "kvstreams.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvstreams.serviceAccount" -}}
{{- if not .root.Values.serviceAccount.create -}}
{{- default "default" .root.Values.serviceAccount.name -}}
{{- else if has .component (list "bridge" "picker") -}}
{{- include "kvstreams.fullname" .root }}-{{ .component }}
{{- else -}}
{{- include "kvstreams.fullname" .root -}}
{{- end -}}
{{- end -}}

{{- define "kvstreams.tokensSecret" -}}
{{- default (printf "%s-tokens" (include "kvstreams.fullname" .)) .Values.auth.existingSecret -}}
{{- end -}}

{{- define "kvstreams.scheme" -}}
{{- ternary "https" "http" (not (empty .Values.tls.existingSecret)) -}}
{{- end -}}
