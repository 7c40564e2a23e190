{{/* Volumes of secrets, as a map from the name of a folder in /etc/kvstreams. Argument: root, component, values. */}}
{{- define "kvstreams.secrets" -}}
{{- $secrets := dict -}}
{{- if .root.Values.auth.enabled -}}
{{- $tokens := include "kvstreams.tokensSecret" .root -}}
{{- $_ := set $secrets "tokens" (dict "name" $tokens "items" (dict "tokens.toml" "tokens.toml")) -}}
{{- if eq .component "front" }}{{ $_ := set $secrets "router-token" (dict "name" $tokens "items" (dict "front-token" "token")) }}{{ end -}}
{{- end -}}
{{- with .root.Values.tls -}}
{{- if .existingSecret -}}
{{- $items := dict "tls.crt" "tls.crt" "tls.key" "tls.key" -}}
{{- if and (eq $.component "front") .caKey }}{{ $_ := set $items .caKey "ca.crt" }}{{ end -}}
{{- $_ := set $secrets "tls" (dict "name" .existingSecret "items" $items) -}}
{{- end -}}
{{- end -}}
{{- range $model, $secret := .values.engineKeys -}}
{{- $folder := printf "engine-key-%s" ($model | sha256sum | trunc 8) -}}
{{- $_ := set $secrets $folder (dict "name" $secret.name "items" (dict $secret.key "key")) -}}
{{- end -}}
{{- if ne .component "front" -}}
{{- with include "kvstreams.kafka" . | fromYaml -}}
{{- if .caSecret.name }}{{ $_ := set $secrets "kafka-ca" (dict "name" .caSecret.name "items" (dict .caSecret.key "ca.crt")) }}{{ end -}}
{{- with .clientSecret -}}
{{- if .name }}{{ $_ := set $secrets "kafka-client" (dict "name" .name "items" (dict .certificate "tls.crt" .key "tls.key")) }}{{ end -}}
{{- end -}}
{{- with .sasl.passwordSecret -}}
{{- if .name }}{{ $_ := set $secrets "kafka-password" (dict "name" .name "items" (dict .key "password")) }}{{ end -}}
{{- end -}}
{{- with .sasl.oidc -}}
{{- if .tokenUrl }}{{ $_ := set $secrets "kafka-oidc" (dict "name" .clientSecret.name "items" (dict .clientSecret.key "secret")) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- with .values.engineKeySecret -}}
{{- $_ := set $secrets "engine-key" (dict "name" .name "items" (dict .key "key")) -}}
{{- end -}}
{{- end -}}
{{- toYaml $secrets -}}
{{- end -}}

{{/* Whether the connection to Kafka uses a token of the service account. Argument: root, component, values. */}}
{{- define "kvstreams.kafkaTokenAudience" -}}
{{- if ne .component "front" -}}
{{- with include "kvstreams.kafka" . | fromYaml }}{{ if hasPrefix "sasl" .security }}{{ .sasl.serviceAccountTokenAudience }}{{ end }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "kvstreams.volumeMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if eq .component "worker" }}
- {name: data, mountPath: /data}
{{- end }}
{{- range $folder, $_ := include "kvstreams.secrets" . | fromYaml }}
- {name: {{ $folder }}, mountPath: /etc/kvstreams/{{ $folder }}, readOnly: true}
{{- end }}
{{- if include "kvstreams.kafkaTokenAudience" . }}
- {name: kafka-token, mountPath: /etc/kvstreams/kafka-token, readOnly: true}
{{- end }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvstreams.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if and (eq .component "worker") (not .values.persistence.enabled) }}
- name: data
  emptyDir: {}
{{- end }}
{{- range $folder, $secret := include "kvstreams.secrets" . | fromYaml }}
- name: {{ $folder }}
  secret:
    secretName: {{ $secret.name }}
    defaultMode: 0440
    items:
      {{- range $key, $path := $secret.items }}
      - {key: {{ $key }}, path: {{ $path }}}
      {{- end }}
{{- end }}
{{- with include "kvstreams.kafkaTokenAudience" . }}
- name: kafka-token
  projected:
    defaultMode: 0440
    sources:
      - serviceAccountToken: {path: token, audience: {{ . | quote }}, expirationSeconds: 3600}
{{- end }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Seconds until a pod that stops is killed: those of its drain, and some for the rest. */}}
{{- define "kvstreams.gracePeriod" -}}
{{- if has .component (list "router" "front" "picker") -}}
{{- $notice := include "kvstreams.setting" (merge (dict "name" "drain_notice_s") .) | float64 -}}
{{- $drain := include "kvstreams.setting" (merge (dict "name" "drain_timeout_s") .) | float64 -}}
{{- ceil (addf $notice $drain 20) | int -}}
{{- else -}}
{{- ternary 60 30 (eq .component "worker") -}}
{{- end -}}
{{- end -}}

{{/* Arguments of the processes that make prompts. Argument: values. */}}
{{- define "kvstreams.promptArgs" -}}
{{- $args := list -}}
{{- range $model, $path := .values.tokenizers }}{{ $args = concat $args (list "--tokenizer" (printf "%s=%s" $model $path)) }}{{ end -}}
{{- range $model, $_ := .values.engineKeys -}}
{{- $args = concat $args (list "--engine-key" (printf "%s=/etc/kvstreams/engine-key-%s/key" $model ($model | sha256sum | trunc 8))) -}}
{{- end -}}
{{- toYaml $args -}}
{{- end -}}

{{/* Whether pods ask the API server. Argument: component, values. */}}
{{- define "kvstreams.asksApiServer" -}}
{{- if eq .component "bridge" -}}
{{- if or .values.service .values.inferencePool }}yes{{ end -}}
{{- else if eq .component "picker" -}}
{{- if .values.inferencePool.name }}yes{{ end -}}
{{- end -}}
{{- end -}}

{{/* Rights to follow an InferencePool and its pods, as rules of a Role. Argument: the pool's name. */}}
{{- define "kvstreams.poolRules" -}}
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  resourceNames: [{{ . }}]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
{{- end -}}

{{/* A probe. Argument: root, component, path, and the name that a picker's health has instead. */}}
{{- define "kvstreams.probe" -}}
{{- if eq .component "picker" -}}
grpc: {port: 9003, service: {{ .service }}}
{{- else -}}
httpGet: {path: {{ .path }}, port: http, scheme: {{ include "kvstreams.scheme" .root | upper }}}
{{- end -}}
{{- end -}}

{{/* The template of the pods. Argument: root, component, values, args, and labels of this bridge alone. */}}
{{- define "kvstreams.podTemplate" -}}
metadata:
  labels:
    {{- include "kvstreams.labels" . | nindent 4 }}
    {{- with .labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with .values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "kvstreams.serviceAccount" . }}
  # Only bridges and pickers ask the API server, for EndpointSlices or an InferencePool.
  automountServiceAccountToken: {{ not (empty (include "kvstreams.asksApiServer" .)) }}
  # A service named kvstreams-router would set KVSTREAMS_ROUTER_PORT and others.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "kvstreams.gracePeriod" . }}
  securityContext:
    {{- toYaml .root.Values.podSecurityContext | nindent 4 }}
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with .values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    {{- if .values.topologySpreadConstraints }}
    {{- toYaml .values.topologySpreadConstraints | nindent 4 }}
    {{- else }}
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "kvstreams.selector" . | nindent 10 }}
          {{- with .labels }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
    {{- end }}
  {{- with .values.initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "kvstreams.image" .root }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      args:
        {{- toYaml .args | nindent 8 }}
      env:
        {{- include "kvstreams.env" . | trim | nindent 8 }}
      ports:
        - {name: http, containerPort: 8000}
        {{- if eq .component "picker" }}
        - {name: grpc, containerPort: 9002}
        - {name: health, containerPort: 9003}
        {{- end }}
      # The process answers that it lives from its first seconds on, long before it is ready.
      startupProbe:
        {{- include "kvstreams.probe" (dict "root" .root "component" .component "path" "/healthz" "service" "liveness") | nindent 8 }}
        periodSeconds: 2
        failureThreshold: 60
      livenessProbe:
        {{- include "kvstreams.probe" (dict "root" .root "component" .component "path" "/healthz" "service" "liveness") | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        {{- include "kvstreams.probe" (dict "root" .root "component" .component "path" "/ready" "service" "readiness") | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 2
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      resources:
        {{- toYaml .values.resources | nindent 8 }}
      volumeMounts:
        {{- include "kvstreams.volumeMounts" . | nindent 8 }}
  volumes:
    {{- include "kvstreams.volumes" . | nindent 4 }}
{{- end -}}
