{{/* The value of a setting as text, as a process reads it from the environment. Whole numbers get no exponent. */}}
{{- define "kvstreams.text" -}}
{{- if kindIs "bool" . -}}
{{- ternary "on" "off" . -}}
{{- else if kindIs "map" . -}}
{{- toJson . -}}
{{- else if kindIs "slice" . -}}
{{- range $n, $value := . }}{{ if $n }},{{ end }}{{ include "kvstreams.text" $value }}{{ end -}}
{{- else if and (kindIs "float64" .) (eq (float64 .) (floor .)) -}}
{{- printf "%.0f" . -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end -}}

{{/* The settings of a process: those of all processes that it has, and its own. Argument: root, component, values. */}}
{{- define "kvstreams.settings" -}}
{{- $settings := dict -}}
{{- range $name := index (.root.Files.Get "files/settings.yaml" | fromYaml).processes .component -}}
{{- if hasKey $.root.Values.settings $name -}}
{{- $_ := set $settings $name (index $.root.Values.settings $name) -}}
{{- end -}}
{{- end -}}
{{- mergeOverwrite (deepCopy $settings) .values.settings | toYaml -}}
{{- end -}}

{{/* One of them, or its default. Argument: root, component, values, name. */}}
{{- define "kvstreams.setting" -}}
{{- $settings := include "kvstreams.settings" . | fromYaml -}}
{{- if hasKey $settings .name -}}
{{- include "kvstreams.text" (index $settings .name) -}}
{{- else -}}
{{- include "kvstreams.text" (index (.root.Files.Get "files/settings.yaml" | fromYaml).defaults .name) -}}
{{- end -}}
{{- end -}}

{{/* How a process connects to Kafka: values.kafka, with its own and Strimzi's values. Argument: root, component, values. */}}
{{- define "kvstreams.kafka" -}}
{{- $kafka := mergeOverwrite (deepCopy .root.Values.kafka) (default dict .values.kafka) -}}
{{- with .root.Values.strimzi -}}
{{- if .enabled -}}
{{- $user := printf "%s-%s" (include "kvstreams.fullname" $.root) (ternary "router" $.component (eq $.component "picker")) -}}
{{- $cluster := required "strimzi.cluster: the name of the Kafka resource is required" .cluster -}}
{{- $_ := set $kafka "bootstrapServers" (default (printf "%s-kafka-bootstrap:%d" $cluster (int .listenerPort)) $kafka.bootstrapServers) -}}
{{- $_ := set $kafka "caSecret" (dict "name" (printf "%s-cluster-ca-cert" $cluster) "key" "ca.crt") -}}
{{- if eq .authentication "tls" -}}
{{- $_ := set $kafka "security" "ssl" -}}
{{- $_ := set $kafka "clientSecret" (dict "name" $user "certificate" "user.crt" "key" "user.key") -}}
{{- else -}}
{{- $_ := set $kafka "security" "sasl_ssl" -}}
{{- $_ := set $kafka.sasl "mechanism" "SCRAM-SHA-512" -}}
{{- $_ := set $kafka.sasl "username" $user -}}
{{- $_ := set $kafka.sasl "passwordSecret" (dict "name" $user "key" "password") -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $kafka -}}
{{- end -}}

{{/* Environment of the connection to Kafka. Argument: as of kvstreams.kafka. */}}
{{- define "kvstreams.kafkaEnv" -}}
{{- $env := dict -}}
{{- with include "kvstreams.kafka" . | fromYaml -}}
{{- $_ := set $env "kafka" (required "kafka.bootstrapServers: host:port of a broker is required" .bootstrapServers) -}}
{{- $_ := set $env "kafka_security" .security -}}
{{- if .properties }}{{ $_ := set $env "kafka_properties" .properties }}{{ end -}}
{{- if .caSecret.name }}{{ $_ := set $env "kafka_tls_ca" "/etc/kvstreams/kafka-ca/ca.crt" }}{{ end -}}
{{- if .clientSecret.name -}}
{{- $_ := set $env "kafka_tls_certificate" "/etc/kvstreams/kafka-client/tls.crt" -}}
{{- $_ := set $env "kafka_tls_key" "/etc/kvstreams/kafka-client/tls.key" -}}
{{- end -}}
{{- if hasPrefix "sasl" .security -}}
{{- with .sasl -}}
{{- $_ := set $env "kafka_sasl_mechanism" .mechanism -}}
{{- if .username }}{{ $_ := set $env "kafka_sasl_username" .username }}{{ end -}}
{{- if .passwordSecret.name }}{{ $_ := set $env "kafka_sasl_password_file" "/etc/kvstreams/kafka-password/password" }}{{ end -}}
{{- if .provider }}{{ $_ := set $env "kafka_oauth_provider" .provider }}{{ end -}}
{{- if .serviceAccountTokenAudience }}{{ $_ := set $env "kafka_oauth_token_file" "/etc/kvstreams/kafka-token/token" }}{{ end -}}
{{- with .oidc -}}
{{- if .tokenUrl -}}
{{- $_ := set $env "kafka_oidc_token_url" .tokenUrl -}}
{{- $_ := set $env "kafka_oidc_client_id" .clientId -}}
{{- if .scope }}{{ $_ := set $env "kafka_oidc_scope" .scope }}{{ end -}}
{{- $_ := set $env "kafka_oidc_client_secret_file" "/etc/kvstreams/kafka-oidc/secret" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $env -}}
{{- end -}}

{{/* The environment of a container. Argument: root, component, values. */}}
{{- define "kvstreams.env" -}}
{{- $env := include "kvstreams.settings" . | fromYaml -}}
{{- $_ := set $env "host" "0.0.0.0" -}}
{{- if has .component (list "router" "front" "picker") -}}
{{- $_ := set $env "port" 8000 -}}
{{- else -}}
{{- $_ := set $env "metrics_port" 8000 -}}
{{- end -}}
{{- if eq .component "picker" -}}
{{- $_ := set $env "picker_port" 9002 -}}
{{- $_ := set $env "picker_health_port" 9003 -}}
{{- end -}}
{{- if eq .component "worker" -}}
{{- $_ := set $env "router" false -}}
{{- $_ := set $env "data_dir" "/data" -}}
{{- end -}}
{{- if ne .component "front" }}{{ $env = mergeOverwrite $env (include "kvstreams.kafkaEnv" . | fromYaml) }}{{ end -}}
{{- if .root.Values.auth.enabled -}}
{{- $_ := set $env "tokens_file" "/etc/kvstreams/tokens/tokens.toml" -}}
{{- end -}}
{{- /* Gateways have no tokens. Those of a picker's HTTP API are still required. */ -}}
{{- if or (not .root.Values.auth.enabled) (eq .component "picker") }}{{ $_ := set $env "allow_anonymous" true }}{{ end -}}
{{- if .root.Values.tls.existingSecret -}}
{{- $_ := set $env "tls_certificate" "/etc/kvstreams/tls/tls.crt" -}}
{{- $_ := set $env "tls_key" "/etc/kvstreams/tls/tls.key" -}}
{{- end -}}
{{- range $name, $value := $env }}
- name: KVSTREAMS_{{ upper $name }}
  value: {{ include "kvstreams.text" $value | quote }}
{{- end }}
{{- if and (has .component (list "router" "picker")) .values.decisionLogSaltSecret.name }}
- name: KVSTREAMS_DECISION_LOG_SALT
  valueFrom: {secretKeyRef: {{ .values.decisionLogSaltSecret | toJson }}}
{{- end }}
{{- if and (eq .component "front") .root.Values.tls.existingSecret .root.Values.tls.caKey }}
- name: SSL_CERT_FILE
  value: /etc/kvstreams/tls/ca.crt
{{- end }}
{{- with .values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}
