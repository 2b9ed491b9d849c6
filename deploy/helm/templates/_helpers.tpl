{{- /* The name of all objects: the release's, with the chart's where it does not contain it. */}}
{{- define "name" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) }}
{{- trunc 63 $name | trimSuffix "-" }}
{{- end }}

{{- define "metadata" -}}
name: {{ include "name" . }}
namespace: {{ .Release.Namespace | quote }}
{{- $chart := printf "%s-%s" .Chart.Name .Chart.Version }}
labels: {app.kubernetes.io/instance: {{ .Release.Name | quote }}, app.kubernetes.io/managed-by: {{ .Release.Service }}, helm.sh/chart: {{ $chart }}}
{{- end }}

{{- /* The label that selects the pods. */}}
{{- define "pods" -}}
{app.kubernetes.io/name: {{ include "name" . }}}
{{- end }}

{{- define "image" -}}
{{- $suffix := ternary "-cpu" "" (eq .Values.device "cpu") }}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else }}{{ .Values.image.repository }}:{{ .Values.image.tag | default (print .Chart.AppVersion $suffix) }}{{ end }}
{{- end }}

{{- /* A replica's share of a machine: on Neuron one device of the smallest instance, with its processors and memory. */}}
{{- define "resources.cpu" -}}
requests: {cpu: "2", memory: 2Gi, ephemeral-storage: 2Gi} # the limit of CPUs is the number of THREADS
limits: {cpu: "2", memory: 4Gi, ephemeral-storage: 61Gi} # both emptyDirs, and the log
{{- end }}
{{- define "resources.inf2" -}}
requests: {cpu: "3", memory: 12Gi, ephemeral-storage: 2Gi, aws.amazon.com/neuron: "1"}
limits: {cpu: "3", memory: 12Gi, ephemeral-storage: 11Gi, aws.amazon.com/neuron: "1"}
{{- end }}
{{- define "resources.trn1" -}}
requests: {cpu: "6", memory: 24Gi, ephemeral-storage: 2Gi, aws.amazon.com/neuron: "1"}
limits: {cpu: "6", memory: 24Gi, ephemeral-storage: 11Gi, aws.amazon.com/neuron: "1"}
{{- end }}

{{- /* The instances that a pod may run on. */}}
{{- define "instances.inf2" -}}
[inf2.xlarge, inf2.8xlarge, inf2.24xlarge, inf2.48xlarge]
{{- end }}
{{- define "instances.trn1" -}}
[trn1.2xlarge, trn1.32xlarge, trn1n.32xlarge]
{{- end }}

{{- /* Not empty where the pods share a volume. */}}
{{- define "has-volume" -}}
{{- with .Values.persistence }}
{{- if or (ne $.Values.device "cpu") .size .storageClass .existingClaim }}yes{{ end }}
{{- end }}
{{- end }}

{{- /* The settings that have a value of their own, and all others. */}}
{{- define "settings" -}}
{{- /* 80 needs rights that an ordinary user does not have on every node. */}}
{{- $settings := dict "PORT" "8080" "GRACEFUL_TERMINATION_TIMEOUT" .Values.gracefulTerminationTimeout }}
{{- if ne .Values.device "cpu" }}
  {{- $_ := set $settings "MODEL_ID" (required "modelId is needed with device inf2 or trn1" .Values.modelId) }}
{{- else if .Values.modelId }}
  {{- $_ := set $settings "MODEL_ID" .Values.modelId }}
{{- end }}
{{- range $name, $value := merge $settings .Values.settings }}
{{- /* Helm reads 2000000 as a float, and would write 2e+06. */}}
{{- if kindIs "float64" $value }}{{ $value = ternary (int64 $value) $value (eq $value (floor $value)) }}{{ end }}
- name: {{ $name }}
  value: {{ toString $value | quote }}
{{- end }}
{{- end }}
