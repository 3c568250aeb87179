{{/* The pod of a model: the core as the container, the worker beside it as one that starts first and stops last. So
     a core that is told to stop still has its worker until the requests in flight have ended.
     dict: root, name, model; of a group of pods this is the first, the leader. */}}
{{- define "tercet.enginePod" -}}
{{- $model := .model -}}
{{- $who := dict "root" .root "component" "engine" "model" .name "values" .model -}}
{{- $settings := merge (dict) $model.settings .root.Values.settings -}}
{{- $source := include "tercet.source" (dict "name" .name "model" $model) -}}
{{- $link := printf "%s/link/worker.sock" .root.Values.runDir -}}
{{- $any := ternary "[::]" "0.0.0.0" .root.Values.ipv6 -}}
{{- $ports := .root.Values.enginePorts -}}
{{- $address := ternary "[$(POD_IP)]" "$(POD_IP)" .root.Values.ipv6 -}}
metadata:
  labels:
    {{- include "tercet.podLabels" $who | nindent 4 }}
  {{- with $model.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "tercet.pod" .root | nindent 2 }}
  {{- with include "tercet.placement" $who | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $model.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  # The grace, the hand-over of what is left, then the worker's own end.
  terminationGracePeriodSeconds: {{ add (include "tercet.seconds" (dict "settings" $settings "name" "grace" "default" 3)) 20 }}
  initContainers:
    - restartPolicy: Always
      {{- include "tercet.workerContainer" . | nindent 6 }}
  containers:
    - name: core
      image: {{ include "tercet.image" (dict "root" .root "image" .root.Values.images.core) }}
      imagePullPolicy: {{ .root.Values.images.pullPolicy }}
      command: [tercet, core]
      args:
        - --core-id=$(POD_NAME)
        - {{ printf "--listen=%s:%d" $any (int64 $ports.grpc) | quote }}
        - {{ printf "--advertise=%s:%d" $address (int64 $ports.grpc) | quote }}
        - --link={{ $link }}
        {{- if gt (int $model.parallel.nodes) 1 }}
        - --remote-workers
        {{- end }}
        - {{ printf "--metrics-host=%s" (ternary "::" "0.0.0.0" .root.Values.ipv6) | quote }}
        - --metrics-port={{ $ports.metrics }}
        - --redis-prefix={{ .root.Values.redis.prefix }}
        - {{ printf "--model=%s" $source | quote }}
        {{- with $model.revision }}
        - {{ printf "--revision=%s" . | quote }}
        {{- end }}
        {{- range $model.servedNames | default (list .name) }}
        - {{ printf "--served-model-name=%s" . | quote }}
        {{- end }}
        {{- if not (hasKey $settings "workerTimeout") }}
        - --worker-timeout={{ $model.startupSeconds }}
        {{- end }}
        {{- with include "tercet.mtlsFlags" .root }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with include "tercet.flags" (dict "root" .root "service" "core" "settings" $settings) }}
        {{- . | trim | nindent 8 }}
        {{- end }}
        {{- with $model.core.extraArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        {{- include "tercet.identityEnv" .root | nindent 8 }}
        - name: POD_IP
          valueFrom: { fieldRef: { fieldPath: status.podIP } }
        {{- include "tercet.redisEnv" .root | nindent 8 }}
        {{- include "tercet.hubEnv" .root | nindent 8 }}
        {{- with $model.core.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - { name: grpc, containerPort: {{ $ports.grpc }} }
        - { name: metrics, containerPort: {{ $ports.metrics }} }
      # Started once the model is loaded and the worker has joined; until then nothing else is asked.
      startupProbe:
        httpGet: { path: /readyz, port: metrics }
        periodSeconds: 5
        failureThreshold: {{ ceil (divf $model.startupSeconds 5) }}
      {{- if .root.Values.mtls.secretName }}
      # The kubelet has no certificate for the port of front ends.
      readinessProbe:
        httpGet: { path: /readyz, port: metrics }
        periodSeconds: 5
        timeoutSeconds: 2
        failureThreshold: 2
      livenessProbe:
        httpGet: { path: /livez, port: metrics }
      {{- else }}
      readinessProbe:
        grpc: { port: {{ $ports.grpc }} }
        periodSeconds: 5
        timeoutSeconds: 2
        failureThreshold: 2
      livenessProbe:
        grpc: { port: {{ $ports.grpc }}, service: liveness }
      {{- end }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      resources:
        {{- toYaml $model.core.resources | nindent 8 }}
      securityContext:
        {{- include "tercet.securityContext" .root | nindent 8 }}
      volumeMounts:
        {{- include "tercet.engineMounts" . | nindent 8 }}
        {{- if .root.Values.mtls.secretName }}
        - { name: mtls, mountPath: /etc/tercet/mtls, readOnly: true }
        {{- end }}
  volumes:
    {{- include "tercet.engineVolumes" . | nindent 4 }}
    {{- with .root.Values.mtls.secretName }}
    - { name: mtls, secret: { secretName: {{ . }}, defaultMode: 0440 } }
    {{- end }}
{{- end -}}

{{/* What both containers mount. dict: root, name, model. */}}
{{- define "tercet.engineMounts" -}}
- { name: run, mountPath: {{ .root.Values.runDir }} }
- { name: tmp, mountPath: /tmp }
- { name: cache, mountPath: /var/cache/tercet }
{{- if .model.volume.claimName }}
- name: model
  mountPath: {{ include "tercet.mountPath" (dict "name" .name "model" .model) }}
  {{- with .model.volume.subPath }}
  subPath: {{ . }}
  {{- end }}
  readOnly: true
{{- end }}
{{- with .model.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}


{{/* The other pods of a group: each has the ranks of its node, and no core. dict: root, name, model. */}}
{{- define "tercet.groupWorkerPod" -}}
{{- $model := .model -}}
{{- $who := dict "root" .root "component" "engine-worker" "model" .name "values" .model -}}
metadata:
  labels:
    {{- include "tercet.podLabels" $who | nindent 4 }}
  {{- with $model.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "tercet.pod" .root | nindent 2 }}
  {{- with include "tercet.placement" $who | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $model.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  # Its ranks are of no use without those of the core's pod, so there is nothing to wait for.
  terminationGracePeriodSeconds: 20
  containers:
    - {{ include "tercet.workerContainer" (merge (dict "remote" true) .) | nindent 6 | trim }}
  volumes:
    {{- include "tercet.engineVolumes" . | nindent 4 }}
    {{- with .root.Values.mtls.secretName }}
    - { name: mtls, secret: { secretName: {{ . }}, defaultMode: 0440 } }
    {{- end }}
{{- end -}}

{{/* The worker. dict: root, name, model, remote (whether its core is in another pod). */}}
{{- define "tercet.workerContainer" -}}
{{- $model := .model -}}
{{- $settings := merge (dict) $model.settings .root.Values.settings -}}
{{- $source := include "tercet.source" (dict "name" .name "model" $model) -}}
{{- $ports := .root.Values.enginePorts -}}
{{- $parallel := $model.parallel -}}
{{- $ranks := mul $parallel.tensor $parallel.pipeline | int -}}
{{- $here := div $ranks $parallel.nodes | int -}}
{{- $group := gt (int $parallel.nodes) 1 -}}
name: worker
image: {{ include "tercet.image" (dict "root" .root "image" (ternary $model.worker.image .root.Values.images.worker (ne $model.worker.image.repository ""))) }}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
command: [tercet, worker]
args:
  {{- if .remote }}
  - --core-address=$(LWS_LEADER_ADDRESS):{{ $ports.grpc }}
  {{- with include "tercet.mtlsFlags" .root }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- else }}
  - --link={{ .root.Values.runDir }}/link/worker.sock
  {{- end }}
  {{- if gt $ranks 1 }}
  - --tensor-parallel-size={{ $parallel.tensor }}
  - --pipeline-parallel-size={{ $parallel.pipeline }}
  {{- end }}
  {{- if $group }}
  - --nodes={{ $parallel.nodes }}
  {{- if .remote }}
  - --node-rank=$(LWS_WORKER_INDEX)
  - --rendezvous=$(LWS_LEADER_ADDRESS):{{ $ports.rendezvous }}
  {{- else }}
  - --node-rank=0
  # Its own address, since its name may not be known yet when it starts.
  - {{ printf "--rendezvous=%s:%d" (ternary "[$(POD_IP)]" "$(POD_IP)" .root.Values.ipv6) (int64 $ports.rendezvous) | quote }}
  {{- end }}
  {{- if not (hasKey $settings "rendezvousTimeout") }}
  - --rendezvous-timeout={{ $model.startupSeconds }}
  {{- end }}
  {{- end }}
  - {{ printf "--metrics-host=%s" (ternary "::" "0.0.0.0" .root.Values.ipv6) | quote }}
  - --metrics-port={{ $ports.workerMetrics }}
  {{- with $model.revision }}
  - {{ printf "--revision=%s" . | quote }}
  {{- end }}
  {{- with include "tercet.flags" (dict "root" .root "service" "worker" "settings" $settings) }}
  {{- . | trim | nindent 2 }}
  {{- end }}
  {{- with $model.worker.extraArgs }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  - {{ $source | quote }}
env:
  {{- include "tercet.identityEnv" .root | nindent 2 }}
  {{- if $group }}
  - name: POD_IP
    valueFrom: { fieldRef: { fieldPath: status.podIP } }
  {{- end }}
  {{- include "tercet.hubEnv" .root | nindent 2 }}
  {{- $limit := dig "resources" "limits" "cpu" "" $model.worker | toString }}
  {{- if and $limit (not (hasKey $settings "threads")) }}
  {{- if eq $here 1 }}
  # A limit of CPU time does not show in the processors that a process may use.
  - name: TERCET_THREADS
    valueFrom: { resourceFieldRef: { containerName: worker, resource: limits.cpu } }
  {{- else if regexMatch "^[0-9]+$" $limit }}
  # The same, divided among the ranks of the pod.
  - name: TERCET_THREADS
    value: {{ max 1 (div $limit $here) | quote }}
  {{- end }}
  {{- end }}
  {{- with $model.worker.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - { name: worker-metrics, containerPort: {{ $ports.workerMetrics }} }
  {{- if and $group (not .remote) }}
  - { name: rendezvous, containerPort: {{ $ports.rendezvous }} }
  {{- end }}
# The core starts after this one, so it must not wait for the model: that is what readiness does.
startupProbe:
  httpGet: { path: /livez, port: worker-metrics }
  periodSeconds: 2
  failureThreshold: 60
readinessProbe:
  httpGet: { path: /readyz, port: worker-metrics }
  periodSeconds: 5
  timeoutSeconds: 2
  failureThreshold: 3
livenessProbe:
  httpGet: { path: /livez, port: worker-metrics }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
resources:
  {{- toYaml $model.worker.resources | nindent 2 }}
securityContext:
  {{- include "tercet.securityContext" .root | nindent 2 }}
volumeMounts:
  {{- include "tercet.engineMounts" . | nindent 2 }}
  {{- if and .remote .root.Values.mtls.secretName }}
  - { name: mtls, mountPath: /etc/tercet/mtls, readOnly: true }
  {{- end }}
{{- end -}}

{{/* What pods with workers mount. dict: root, name, model. */}}
{{- define "tercet.engineVolumes" -}}
# The link's socket. Rings and doorbells travel over it as descriptors; nothing is in /dev/shm.
- { name: run, emptyDir: { medium: Memory, sizeLimit: 16Mi } }
- { name: tmp, emptyDir: {} }
{{- if eq .model.cache.kind "claim" }}
- { name: cache, persistentVolumeClaim: { claimName: {{ required (printf "models.%s.cache.claimName: name the claim" .name) .model.cache.claimName }} } }
{{- else if eq .model.cache.kind "emptyDir" }}
- name: cache
  emptyDir: {{ ternary (dict) (dict "sizeLimit" .model.cache.size) (eq .model.cache.size "") | toJson }}
{{- end }}
{{- with .model.volume.claimName }}
- { name: model, persistentVolumeClaim: { claimName: {{ . }}, readOnly: true } }
{{- end }}
{{- with .model.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Names of the models that span several nodes; empty where none does. */}}
{{- define "tercet.groupModels" -}}
{{- range $name := keys .Values.models | sortAlpha -}}
{{- $model := include "tercet.model" (dict "root" $ "name" $name) | fromJson -}}
{{- if gt (int $model.parallel.nodes) 1 }}{{ $name }} {{ end -}}
{{- end -}}
{{- end -}}

{{/* What scales a model. dict: model, name (of the object). */}}
{{- define "tercet.scaleTarget" -}}
{{- if gt (int .model.parallel.nodes) 1 -}}
{ apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, name: {{ .name }} }
{{- else -}}
{ apiVersion: apps/v1, kind: {{ .model.workload }}, name: {{ .name }} }
{{- end -}}
{{- end -}}
