{{- define "shardcache.tierContainer" -}}
- name: tier
  image: {{ include "shardcache.image" . }}
  {{- with .Values.image.pullPolicy }}
  imagePullPolicy: {{ . }}
  {{- end }}
  args:
    - cluster
    - run
    - --nodes=/etc/shardcache/tier/nodes
    - --node=$(NODE_NAME)
    - --shared-certificate
    - --wait
    - --listen=$(POD_IP)
    - --store=$(STORE)
    - --max-size=$(MAX_SIZE)
    {{- if ne (int .Values.tier.port) 9081 }}
    - --owner-port={{ int .Values.tier.port }}
    {{- end }}
    {{- with .Values.tier.extraArgs }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  env:
    - name: NODE_NAME
      valueFrom:
        fieldRef: {fieldPath: spec.nodeName}
    - name: POD_IP
      valueFrom:
        fieldRef: {fieldPath: status.podIP}
    - {name: STORE, value: {{ .Values.tier.store | quote }}}
    - {name: MAX_SIZE, value: {{ .Values.tier.maxSize | quote }}}
  ports:
    # Two numbers would be two rules of the NetworkPolicy: some implementations see one, some the other.
    - {name: tier, containerPort: {{ int .Values.tier.port }}, hostPort: {{ int .Values.tier.port }}, protocol: TCP}
  startupProbe:
    exec: {command: [python, -m, shardcache.cluster.nginx_probe]}
    periodSeconds: 2
    timeoutSeconds: 10
    failureThreshold: 150  # after a power loss, it first deletes what it has cached
  readinessProbe:
    exec: {command: [python, -m, shardcache.cluster.nginx_probe]}
    periodSeconds: 15
    timeoutSeconds: 10
    failureThreshold: 2
  livenessProbe:
    exec: {command: [python, -m, shardcache.cluster.nginx_probe]}
    periodSeconds: 20
    timeoutSeconds: 10
    failureThreshold: 6
  securityContext:
    runAsNonRoot: true
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
  resources: {{- toYaml .Values.tier.resources | nindent 4 }}
  volumeMounts:
    - {name: tier-run, mountPath: /run/shardcache-tier}
    - {name: tier-cache, mountPath: /var/cache/shardcache-tier, mountPropagation: HostToContainer}
    - {name: tier-config, mountPath: /etc/shardcache/tier, readOnly: true}
{{- end }}

{{- define "shardcache.tierVolumes" -}}
- name: tier-run
  emptyDir: {medium: Memory, sizeLimit: 512Mi}  # names of its files contain signatures
- name: tier-cache
  hostPath: {path: {{ .Values.hostPaths.tier }}, type: DirectoryOrCreate}
- name: tier-config
  projected:
    defaultMode: 0440
    sources:  # optional: without them the tier does not start, and the daemon reads from the store
      - configMap: {name: {{ .Values.tier.nodesConfigMap }}, optional: true}
      - secret:
          name: {{ .Values.tier.certificateSecret }}
          optional: true
          items:
            - {key: ca.crt, path: ca.pem}
            - {key: tls.crt, path: node.pem}
            - {key: tls.key, path: node.key}
{{- end }}
