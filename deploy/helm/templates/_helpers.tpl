{{- /* The name of all objects: the release's, with the chart's where it does not contain it. */}}
{{- define "name" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) }}
{{- trunc 63 $name | trimSuffix "-" }}
{{- end }}

{{- /*
A file of ../kubernetes for this release: (list . "base/service.yaml"). The objects there and the label that selects the pods
are called neuron-textgen, the image is not.
*/}}
{{- define "manifest" -}}
{{- $root := first . }}
{{- $text := $root.Files.Get (printf "manifests/%s" (last .)) }}
{{- $text = regexReplaceAll `(name|claimName|serviceAccountName): neuron-textgen\b` $text (printf "${1}: %s" (include "name" $root)) }}
{{- $object := $text | fromYaml }}
{{- $labels := dict "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version) "app.kubernetes.io/managed-by" $root.Release.Service "app.kubernetes.io/instance" $root.Release.Name }}
{{- $_ := set $object.metadata "namespace" $root.Release.Namespace }}
{{- $_ := set $object.metadata "labels" (merge (default dict $object.metadata.labels) $labels) }}
{{- toYaml $object }}
{{- end }}

{{- define "image" -}}
{{- $suffix := ternary "-cpu" "" (eq .Values.device "cpu") }}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else }}{{ .Values.image.repository }}:{{ .Values.image.tag | default (print .Chart.AppVersion $suffix) }}{{ end }}
{{- end }}

{{- /* Not empty where the pods share a volume. */}}
{{- define "has-volume" -}}
{{- with .Values.persistence }}
{{- if or (ne $.Values.device "cpu") .size .storageClass .existingClaim }}yes{{ end }}
{{- end }}
{{- end }}
