{{- define "shardcache.selector" -}}
app.kubernetes.io/name: shardcache
app.kubernetes.io/instance: {{ .Values.name }}
{{- end }}

{{- define "shardcache.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Its name says what it holds: another config is another ConfigMap, and so another template of the pods. */}}
{{- define "shardcache.config" -}}
{{ .Values.name }}-config-{{ .Values.config | sha256sum | trunc 10 }}
{{- end }}

{{- define "shardcache.serviceAccount" -}}
{{ .Values.serviceAccount.name | default .Values.name }}
{{- end }}

{{- define "shardcache.priorityClass" -}}
{{ .Values.priorityClass.name | default .Values.name }}
{{- end }}
