{{/* What containers have in common: settings as flags, environment, safety. */}}

{{/* A value as the command line has it. Helm's numbers are floats, which would print as 1e+06. */}}
{{- define "tercet.plain" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* Settings as a list of flags; each service takes those that it knows. dict: root, service, settings. */}}
{{- define "tercet.flags" -}}
{{- $known := get (.root.Files.Get "files/flags.json" | fromJson) .service -}}
{{- $settings := .settings -}}
{{- range $name := keys $settings | sortAlpha -}}
{{- $value := get $settings $name -}}
{{- $flag := kebabcase $name -}}
{{- if and (has $name $known) (not (kindIs "invalid" $value)) -}}
{{- if kindIs "bool" $value }}
- {{ printf "--%s%s" (ternary "" "no-" $value) $flag | quote }}
{{- else if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%s" $flag (include "tercet.plain" .) | quote }}
{{- end }}
{{- else }}
- {{ printf "--%s=%s" $flag (include "tercet.plain" $value) | quote }}
{{- end }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Seconds of a setting, rounded up. dict: settings, name, default. */}}
{{- define "tercet.seconds" -}}
{{- get .settings .name | default .default | float64 | ceil | int64 -}}
{{- end -}}

{{/* The files of mTLS between front ends and cores. */}}
{{- define "tercet.mtlsFlags" -}}
{{- if .Values.mtls.secretName -}}
- --mtls-cert=/etc/tercet/mtls/tls.crt
- --mtls-key=/etc/tercet/mtls/tls.key
- --mtls-ca=/etc/tercet/mtls/ca.crt
- --mtls-name={{ .Values.mtls.coreName }}
{{- end -}}
{{- end -}}

{{- define "tercet.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "tercet.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.runAsUser }}
runAsGroup: {{ .Values.podSecurity.runAsGroup }}
fsGroup: {{ .Values.podSecurity.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* A pod's fields that are the same for all. Service links are off because a Service called `tercet` would set
     TERCET_PORT, which is the name of a setting. */}}
{{- define "tercet.pod" -}}
serviceAccountName: {{ include "tercet.serviceAccountName" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- include "tercet.podSecurityContext" . | nindent 2 }}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Where pods go. dict: root, component, model, values (of the front end or of a model). */}}
{{- define "tercet.placement" -}}
{{- $selector := include "tercet.selector" . }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  - {{ toYaml (merge (dict) . (dict "maxSkew" 1 "whenUnsatisfiable" "ScheduleAnyway")) | indent 4 | trim }}
    labelSelector:
      matchLabels:
        {{- $selector | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Who the container is, for traces, metrics and logs. */}}
{{- define "tercet.identityEnv" -}}
- name: POD_NAME
  valueFrom: { fieldRef: { fieldPath: metadata.name } }
- name: POD_NAMESPACE
  valueFrom: { fieldRef: { fieldPath: metadata.namespace } }
- name: NODE_NAME
  valueFrom: { fieldRef: { fieldPath: spec.nodeName } }
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.pod.name=$(POD_NAME),k8s.namespace.name=$(POD_NAMESPACE),k8s.node.name=$(NODE_NAME)
{{- end -}}

{{/* The URL of Redis, which may hold a password, only ever comes from the environment. */}}
{{- define "tercet.redisEnv" -}}
{{- $bundled := .Values.redis.bundled -}}
{{- $external := .Values.redis.external.urlSecret -}}
{{- if $external.name -}}
- name: TERCET_REDIS_URL
  valueFrom: { secretKeyRef: { name: {{ $external.name }}, key: {{ $external.key }} } }
{{- else if not $bundled.enabled -}}
{{- fail "redis: front ends find cores through Redis; enable redis.bundled, or name redis.external.urlSecret" -}}
{{- else if $bundled.passwordSecret.name -}}
- name: REDIS_PASSWORD
  valueFrom: { secretKeyRef: { name: {{ $bundled.passwordSecret.name }}, key: {{ $bundled.passwordSecret.key }} } }
- name: TERCET_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "tercet.redisHost" . }}:{{ $bundled.port }}/0
{{- else -}}
- name: TERCET_REDIS_URL
  value: redis://{{ include "tercet.redisHost" . }}:{{ $bundled.port }}/0
{{- end -}}
{{- end -}}

{{/* Whether Redis is the release's own; an external one wins. Empty for no. */}}
{{- define "tercet.bundlesRedis" -}}
{{- if and .Values.redis.bundled.enabled (not .Values.redis.external.urlSecret.name) -}}yes{{- end -}}
{{- end -}}

{{- define "tercet.hubEnv" -}}
- name: HF_HOME
  value: /var/cache/tercet/huggingface
{{- with .Values.hub.endpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- with .Values.hub.tokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom: { secretKeyRef: { name: {{ .name }}, key: {{ .key }} } }
{{- end }}
{{- end }}
{{- end -}}

{{/* Names of the models that come from the hub; empty where none does. */}}
{{- define "tercet.hubModels" -}}
{{- range $name := keys .Values.models | sortAlpha -}}
{{- $model := include "tercet.model" (dict "root" $ "name" $name) | fromJson -}}
{{- if not $model.volume.claimName }}{{ $name }} {{ end -}}
{{- end -}}
{{- end -}}
