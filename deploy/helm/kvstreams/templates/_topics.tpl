{{/* A setting that all processes of a scope share, as a number. Argument: root, name. */}}
{{- define "kvstreams.scopeSetting" -}}
{{- include "kvstreams.setting" (dict "root" .root "component" "router" "values" (dict "settings" (dict)) "name" .name) -}}
{{- end -}}

{{/* The topics of the scope by their fields in streams/topics.py: each one's name and configuration. */}}
{{- define "kvstreams.topics" -}}
{{- $prefix := include "kvstreams.scopeSetting" (dict "root" . "name" "topic_prefix") -}}
{{- $retention := include "kvstreams.scopeSetting" (dict "root" . "name" "retention_ms") -}}
{{- $booking := include "kvstreams.scopeSetting" (dict "root" . "name" "booking_ttl_s") | float64 -}}
{{- $partitions := include "kvstreams.scopeSetting" (dict "root" . "name" "partitions") | int64 -}}
{{- $decisionRetention := include "kvstreams.scopeSetting" (dict "root" . "name" "decision_log_retention_ms") -}}
{{- $decisionBytes := div (include "kvstreams.scopeSetting" (dict "root" . "name" "decision_log_bytes_max") | int64) $partitions -}}
{{- $windowMs := round (mulf (include "kvstreams.scopeSetting" (dict "root" . "name" "history_window_s") | float64) 1000) 0 | int64 -}}
{{- $compacted := dict "cleanup.policy" "compact" "segment.bytes" "67108864" "segment.ms" "600000" "min.cleanable.dirty.ratio" "0.2" "min.compaction.lag.ms" (max 60000 $windowMs | toString) "delete.retention.ms" "86400000" -}}
kv_events:
  name: {{ $prefix }}kv-events
  config: {cleanup.policy: delete, retention.ms: {{ $retention | quote }}, max.message.bytes: "8388608"}
cxl_events:
  name: {{ $prefix }}cxl-events
  config: {cleanup.policy: delete, retention.ms: {{ $retention | quote }}}
workers:
  name: {{ $prefix }}workers
  config: {{ toJson $compacted }}
worker_metrics:
  name: {{ $prefix }}worker-metrics
  config: {cleanup.policy: delete, retention.ms: {{ add 600000 $windowMs | quote }}, segment.ms: "60000"}
router_loads:
  name: {{ $prefix }}router-loads
  config: {{ merge (dict "cleanup.policy" "compact,delete" "message.timestamp.type" "LogAppendTime" "retention.ms" (add (round (mulf $booking 2000) 0 | int64) $windowMs | toString) "segment.ms" "60000" "min.compaction.lag.ms" ($windowMs | toString) "max.message.bytes" "8388608") $compacted | toJson }}
kv_control:
  name: {{ $prefix }}kv-control
  config: {cleanup.policy: delete, retention.ms: "600000", segment.ms: "60000"}
dead_letters:
  name: {{ $prefix }}kv-dead-letters
  config: {cleanup.policy: delete, retention.ms: "604800000", max.message.bytes: "8388608"}
router_decisions:
  name: {{ $prefix }}router-decisions
  config:
    cleanup.policy: delete
    retention.ms: {{ $decisionRetention | quote }}
    retention.bytes: {{ $decisionBytes | quote }}
    segment.bytes: {{ max 8388608 (min 67108864 (div $decisionBytes 4)) | quote }}
    max.message.bytes: "4194304"
index_changelog:
  name: {{ $prefix }}kvstreams-prefix-index-changelog
  config: {{ merge (dict "max.message.bytes" "1638400") $compacted | toJson }}
cxl_changelog:
  name: {{ $prefix }}kvstreams-cxl-blocks-changelog
  config: {{ toJson $compacted }}
{{- end -}}
