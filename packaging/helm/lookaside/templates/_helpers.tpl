{{- define "lookaside.name" -}}
{{- if contains "lookaside" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-lookaside" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "lookaside.selector" -}}
app.kubernetes.io/name: lookaside
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "lookaside.labels" -}}
{{ include "lookaside.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "lookaside.tokenSecret" -}}
{{ .Values.admin.tokenSecret | default (printf "%s-token" (include "lookaside.name" .)) }}
{{- end }}

{{- /* An image's reference: dict "image" IMAGE "tag" DEFAULT. */ -}}
{{- define "lookaside.image" -}}
{{- if .image.digest }}{{ .image.repository }}@{{ .image.digest }}
{{- else }}{{ .image.repository }}:{{ .image.tag | default .tag }}{{ end }}
{{- end }}

{{- /* What Pod Security calls restricted. */ -}}
{{- define "lookaside.securityContext" -}}
allowPrivilegeEscalation: false
capabilities: {drop: ["ALL"]}
{{- end }}

{{- define "lookaside.settings" -}}
arena:
  limit: {{ .Values.arena.sizeGiB }}G
  kind: {{ ternary "hugetlb" "memfd" .Values.arena.hugePages }}
admin:
  # The kubelet asks /healthz and /readyz at the pod's address. All else asks for the token.
  token_file: /etc/lookaside/token
{{- with .Values.admin.hosts }}
  hosts: {{ join "," . }}
{{- end }}
log:
  format: json
{{- end }}
