{{/* The pod of a model: the core as the container, the worker beside it as one that starts first and stops last. So
     a core that is told to stop still has its worker until the requests in flight have ended.
     dict: root, name, model. */}}
{{- define "tercet.enginePod" -}}
{{- $root := .root -}}
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
    - name: worker
      restartPolicy: Always
      image: {{ include "tercet.image" (dict "root" .root "image" (ternary $model.worker.image .root.Values.images.worker (ne $model.worker.image.repository ""))) }}
      imagePullPolicy: {{ .root.Values.images.pullPolicy }}
      command: [tercet, worker]
      args:
        - --link={{ $link }}
        - {{ printf "--metrics-host=%s" (ternary "::" "0.0.0.0" .root.Values.ipv6) | quote }}
        - --metrics-port={{ $ports.workerMetrics }}
        {{- with $model.revision }}
        - {{ printf "--revision=%s" . | quote }}
        {{- end }}
        {{- with include "tercet.flags" (dict "root" .root "service" "worker" "settings" $settings) }}
        {{- . | trim | nindent 8 }}
        {{- end }}
        {{- with $model.worker.extraArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        - {{ $source | quote }}
      env:
        {{- include "tercet.identityEnv" .root | nindent 8 }}
        {{- include "tercet.hubEnv" .root | nindent 8 }}
        {{- if and (dig "resources" "limits" "cpu" "" $model.worker) (not (hasKey $settings "threads")) }}
        # A limit of CPU time does not show in the processors that a process may use.
        - name: TERCET_THREADS
          valueFrom: { resourceFieldRef: { containerName: worker, resource: limits.cpu } }
        {{- end }}
        {{- with $model.worker.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - { name: worker-metrics, containerPort: {{ $ports.workerMetrics }} }
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
        {{- toYaml $model.worker.resources | nindent 8 }}
      securityContext:
        {{- include "tercet.securityContext" .root | nindent 8 }}
      volumeMounts:
        {{- include "tercet.engineMounts" . | nindent 8 }}
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
    # The link's socket. Rings and doorbells travel over it as descriptors; nothing is in /dev/shm.
    - { name: run, emptyDir: { medium: Memory, sizeLimit: 16Mi } }
    - { name: tmp, emptyDir: {} }
    {{- if eq $model.cache.kind "claim" }}
    - { name: cache, persistentVolumeClaim: { claimName: {{ required (printf "models.%s.cache.claimName: name the claim" .name) $model.cache.claimName }} } }
    {{- else if eq $model.cache.kind "emptyDir" }}
    - name: cache
      emptyDir: {{ ternary (dict) (dict "sizeLimit" $model.cache.size) (eq $model.cache.size "") | toJson }}
    {{- end }}
    {{- with $model.volume.claimName }}
    - { name: model, persistentVolumeClaim: { claimName: {{ . }}, readOnly: true } }
    {{- end }}
    {{- with .root.Values.mtls.secretName }}
    - { name: mtls, secret: { secretName: {{ . }}, defaultMode: 0440 } }
    {{- end }}
    {{- with $model.extraVolumes }}
    {{- toYaml . | nindent 4 }}
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
