{{/* Names and labels. Arguments are the root context, or a dict with `root` and what is said beside it. */}}

{{/* The beginning of all names. Nothing is cut off: two releases must never share a name by accident. */}}
{{- define "tercet.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := .Values.fullnameOverride | default (ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name)) -}}
{{- if gt (len $full) 30 -}}
{{- fail (printf "fullnameOverride: %q would begin all names and has %d characters; give one of at most 30" $full (len $full)) -}}
{{- end -}}
{{- $full -}}
{{- end -}}

{{- define "tercet.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "tercet.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{/* What selects pods; never changes in the life of a release. dict: root, component, model (optional). */}}
{{- define "tercet.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .model }}
tercet/model: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* What selects all pods of a model on several nodes, with the core and without. dict: root, model. */}}
{{- define "tercet.groupSelector" -}}
matchLabels:
  app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
  app.kubernetes.io/instance: {{ .root.Release.Name }}
  tercet/model: {{ .model | quote }}
{{- end -}}

{{/* Labels of everything that belongs to a component. dict as above. */}}
{{- define "tercet.labels" -}}
{{ include "tercet.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of pods: without the chart's version, so that a chart that changes nothing of a pod does not replace it. dict:
     root, component, model, values. */}}
{{- define "tercet.podLabels" -}}
{{ include "tercet.selector" . }}
{{- with .root.Values.labels }}
{{ toYaml . }}
{{- end }}
{{- with .values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* metadata of an object. dict: root, component, model, name, annotations, extraLabels (the last three optional). */}}
{{- define "tercet.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "tercet.labels" . | nindent 2 }}
  {{- with .extraLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default (dict) .annotations) .root.Values.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* dict: root, image. */}}
{{- define "tercet.image" -}}
{{- $registry := .root.Values.images.registry -}}
{{- $name := ternary (printf "%s/%s" $registry .image.repository) .image.repository (ne $registry "") -}}
{{- if .image.digest -}}
{{ printf "%s@%s" $name .image.digest }}
{{- else -}}
{{ printf "%s:%s" $name (.image.tag | default .root.Values.images.tag | default .root.Chart.AppVersion) }}
{{- end -}}
{{- end -}}

{{/* A model's values over those of modelDefaults, as JSON. dict: root, name. */}}
{{- define "tercet.model" -}}
{{- mergeOverwrite (deepCopy .root.Values.modelDefaults) (deepCopy (get .root.Values.models .name)) | toJson -}}
{{- end -}}

{{/* Where a model's volume is mounted, in cores, workers and front ends alike: front ends read the tokenizer from the
     path that the core announces. dict: name, model. */}}
{{- define "tercet.mountPath" -}}
{{- .model.volume.mountPath | default (printf "/models/%s" .name) -}}
{{- end -}}

{{/* The model as services are told: a path in its volume, or the hub id. dict: name, model. */}}
{{- define "tercet.source" -}}
{{- if .model.volume.claimName -}}
{{- $path := include "tercet.mountPath" . -}}
{{- ternary $path (printf "%s/%s" $path .model.source) (eq .model.source ".") -}}
{{- else -}}
{{- .model.source -}}
{{- end -}}
{{- end -}}

{{/* The hosts of the bundled Redis and of the cores' Services. */}}
{{- define "tercet.redisHost" -}}
{{- printf "%s-redis.%s.svc.%s" (include "tercet.fullname" .) .Release.Namespace .Values.clusterDomain -}}
{{- end -}}
