#!/usr/bin/env bash
# Builds the image for CPUs by `make image DEVICE=cpu` and runs it: locked up as far as it goes, as SageMaker does, and wrongly.
#
#   smoke.sh [BASE_IMAGE]     as root; podman is installed where it is missing (Debian, Ubuntu)
#
# Without BASE_IMAGE it is the Makefile's, or stand_in_base.sh's where no registry can be reached. No container, process or file
# is left; the images are, so that the next run takes seconds. Where podman cannot be had it says so and ends with 0.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."
image=localhost/neuron-textgen/smoke:cpu
stand_in=localhost/neuron-textgen/stand-in-base:latest
work=$(mktemp -d)
chmod 755 "$work"
tidy_up() {
    podman ps --all --quiet --filter "label=smoke=$$" 2>/dev/null | xargs -r podman rm --force --time 0 >/dev/null || true
    rm -rf "$work"
}
trap tidy_up EXIT

say() { printf '[%3d s] %s\n' "$SECONDS" "$*"; }
skip() { say "skipped: $*"; exit 0; }
fail() {
    say "FAILED: $*"
    [ -z "${name:-}" ] || podman logs "$name" 2>&1 | tail -n 20
    exit 1
} >&2
has() { grep -qF -- "$1" <<<"$2" || fail "no '$1' in: $2"; }

[ "$(id -u)" = 0 ] || skip "needs root"
if ! { command -v podman && command -v curl && command -v nsenter; } >/dev/null; then
    command -v apt-get >/dev/null || skip "no podman here, and no apt-get to install it with"
    { apt-get -o DPkg::Lock::Timeout=300 update && DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install \
        --yes --no-install-recommends --no-upgrade podman runc mmdebstrap curl util-linux; } >"$work/log" 2>&1 ||
        skip "podman cannot be installed: $(tail -n 1 "$work/log")"
fi

# What podman cannot do in a container or a small virtual machine: crun with cgroups of both versions, limits above our own,
# health checks by systemd.
at_most() { awk -v limit="$1" -v most="$2" 'BEGIN { print (limit == "unlimited" || limit + 0 > most + 0) ? most : limit }'; }
files=$(at_most "$(ulimit -Hn)" 65536) processes=$(at_most "$(ulimit -Hu)" 8192)
cat >"$work/containers.conf" <<END
[containers]
default_ulimits = ["nofile=$files:$files", "nproc=$processes:$processes"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
$(command -v runc >/dev/null && echo 'runtime = "runc"')
END
export CONTAINERS_CONF=$work/containers.conf DISABLE_HC_SYSTEMD=true
podman info >"$work/log" 2>&1 || skip "podman does not work here: $(tail -n 1 "$work/log")"

base=${1:-$(make --dry-run image DEVICE=cpu ENGINE=podman | grep -oP '(?<=BASE_IMAGE=)\S+')}
if ! podman image exists "$base" && ! timeout 120 podman pull --quiet "$base" >"$work/log" 2>&1; then
    [ $# -eq 0 ] || fail "$base is not here and cannot be pulled: $(tail -n 1 "$work/log")"
    base=$stand_in
    if ! podman image exists "$base"; then
        command -v mmdebstrap >/dev/null || apt-get install --yes --no-install-recommends mmdebstrap >"$work/log" 2>&1 ||
            skip "no registry, and no mmdebstrap for a stand-in"
        tests/image/stand_in_base.sh "$base" >"$work/log" 2>&1 || fail "no stand-in: $(tail -n 20 "$work/log")"
    fi
fi
say "on $base"

# pip finds packages in the build as it does outside: the same settings, certificates and folders.
inside=/etc/ssl/certs/ca-certificates.crt
{
    printf '[global]\ncert = %s\n' "$inside"
    python3 -m pip config list |
        sed -nE "s/^[^=]*\.(default-)?(index-url|extra-index-url|find-links|trusted-host|proxy|timeout)='(.*)'$/\2 = \3/p" |
        awk -F ' = ' '{ gsub(/\\n/, " "); last[$1] = $0 } END { for (key in last) print last[key] }'
} >"$work/pip.conf"
mounts="--volume $work/pip.conf:/etc/pip.conf:ro --volume ${SSL_CERT_FILE:-$inside}:$inside:ro"
for folder in $(grep -oE '[ :]/[^ ]+' "$work/pip.conf" | cut -c 2- | sed -E 's#^//##; s#/simple/?$##' | sort -u); do
    [ ! -d "$folder" ] || mounts+=" --volume $folder:$folder:ro"
done

old=$(podman image inspect --format '{{.Id}}' "$image" 2>/dev/null || true)
make image DEVICE=cpu ENGINE=podman IMAGE="${image%:*}" BASE_IMAGE="$base" ARGS="--isolation chroot $mounts" >"$work/log" 2>&1 ||
    fail "make image: $(tail -n 40 "$work/log")"
[ -z "$old" ] || [ "$old" = "$(podman image inspect --format '{{.Id}}' "$image")" ] || podman rmi "$old" >/dev/null 2>&1 || true
say "built: $(podman image inspect --format '{{.Size}}' "$image" | numfmt --to=si)B"

# A network of its own for each, in which ports begin where they do in Docker's containers.
flags="--label smoke=$$ --network none --sysctl net.ipv4.ip_unprivileged_port_start=0"
locked="--read-only --read-only-tmpfs=false --tmpfs /tmp --cap-drop all --security-opt no-new-privileges"
# start FLAGS ARGUMENTS…: a container in the background, as $name.
start() {
    local more=$1
    shift
    # shellcheck disable=SC2086 # flags, separated by spaces
    name=$(podman run --detach --health-interval disable $flags $more "$image" "$@") || fail "does not start"
    pid=$(podman inspect --format '{{.State.Pid}}' "$name")
}
ask() { nsenter --net --target "$pid" curl --silent --show-error --max-time 20 "$@"; }
status() { ask --output /dev/null --write-out '%{http_code}' "$1" 2>/dev/null || true; }
is_running() { [ "$(podman inspect --format '{{.State.Running}}' "$name")" = true ]; }
# Waits until a path answers 200; what it answered before is in $seen then.
ready() {
    local now=''
    seen=''
    until [ "$now" = 200 ]; do
        if [ "$now" = 503 ] && [[ $seen != *503* ]] && podman healthcheck run "$name" >/dev/null 2>&1; then
            fail "healthy before it is ready"
        fi
        [ "${seen##* }" = "$now" ] || seen+=" $now"
        if [ "$SECONDS" -gt $((begin + 90)) ] || ! is_running; then fail "not ready: $seen"; fi
        now=$(status "$1")
    done
}
stop() {
    local begin=$SECONDS
    podman stop --time 20 "$name" >/dev/null
    code=$(podman inspect --format '{{.State.ExitCode}}' "$name")
    [ "$code" = 0 ] || fail "exit code $code after SIGTERM, in $((SECONDS - begin)) s"
}
once() { podman run --rm --network none --label smoke=$$ "$image" "$@" 2>&1; }

[ "$(podman image inspect --format '{{len .Config.Cmd}}' "$image")" = 0 ] || fail "arguments that nobody gave"
podman run --rm --network none --entrypoint touch "$image" /data/hub || fail "/data cannot be written"
has --model-id "$(once --help)"
has --model-id "$(once serve --help)"
wrong=$(once --max-batch-size 0) && fail "a batch of 0 is taken"
has "--max-batch-size '0': must be at least 1" "$wrong"
has "inf2.xlarge" "$(once plan --model-id /app/demo/model)"
has --output "$(once compile --help)"
unable=$(once compile --model-id /app/demo/model --output /data/compiled --tp-degree 2) && fail "compiled on a CPU's image"
has "needs transformers-neuronx" "$unable"
say "can write to /data, tells its settings, and what is wrong with one"

# The least that a container can have: no rights, nothing to write but /tmp, and a volume that belongs to somebody else.
mkdir "$work/data"
begin=$SECONDS
start "$locked --volume $work/data:/data" --max-batch-size 2
ready http://127.0.0.1/health
has 503 "$seen"
say "ready on port 80, $((SECONDS - begin)) s after its start; 503 and unhealthy before"
has '"generated_text":" Deep learning is' "$(ask http://127.0.0.1/generate -H 'Content-Type: application/json' \
    -d '{"inputs": "What is Deep Learning?", "parameters": {"max_new_tokens": 20}}')"
has '"content":"Deep learning is' "$(ask http://127.0.0.1/v1/chat/completions -H 'Content-Type: application/json' \
    -d '{"messages": [{"role": "user", "content": "What is Deep Learning?"}], "max_tokens": 20, "temperature": 0}')"
has '"max_batch_size":2' "$(ask http://127.0.0.1/info)"
podman healthcheck run "$name" || fail "unhealthy"
has "uid=1000" "$(podman exec "$name" id)"
has "CapEff: 0000000000000000" "$(podman exec "$name" grep CapEff /proc/1/status | tr '\t' ' ')"
orphan=$(podman exec "$name" bash -c 'sleep 0.1 >/dev/null & echo $!')
deadline=$((SECONDS + 5))
while podman exec "$name" test -e "/proc/$orphan"; do [ "$SECONDS" -lt $deadline ] || fail "an orphan was not reaped"; done
stop
say "answers, is healthy, has no rights, reaps orphans, ends with 0"

# As SageMaker: root, the word "serve", and variables alone.
begin=$SECONDS
start "--user 0 --env SAGEMAKER_BIND_TO_PORT=8081 --env HF_MODEL_ID=/app/demo/model --env HF_BATCH_SIZE=3" serve
ready http://127.0.0.1:8081/ping
has '"generated_text":"' "$(ask http://127.0.0.1:8081/invocations -H 'Content-Type: application/json' -d '{"inputs": "Hello"}')"
has '"max_batch_size":3' "$(ask http://127.0.0.1:8081/info)"
podman healthcheck run "$name" || fail "unhealthy"
stop
left=$(podman diff "$name" | grep -E ' /(tmp/neuron-textgen|data/|app/)' | grep -vE ' /data/model-cache(/|$)' || true)
[ -z "$left" ] || fail "it leaves behind: $left"
say "as root, by variables and on another port as well; leaves nothing behind"

# With the model to try in it: no network, and nothing mounted.
make image DEVICE=cpu MODEL=smollm2 ENGINE=podman IMAGE="${image%:*}" BASE_IMAGE="$base" ARGS="--isolation chroot $mounts" \
    >"$work/log" 2>&1 || fail "make image MODEL=smollm2: $(tail -n 40 "$work/log")"
image+=-smollm2
say "built with smollm2: $(podman image inspect --format '{{.Size}}' "$image" | numfmt --to=si)B"
begin=$SECONDS
start ""
ready http://127.0.0.1/health
say "ready $((SECONDS - begin)) s after its start"
has '"model_id":"smollm2"' "$(ask http://127.0.0.1/info)"
# A question that int8 answers alike on every processor: the next best words are far less likely.
has '"content":"Deep Learning is a' "$(ask http://127.0.0.1/v1/chat/completions -H 'Content-Type: application/json' \
    -d '{"messages": [{"role": "user", "content": "What is Deep Learning?"}], "max_tokens": 20, "temperature": 0}')"
stop
say "the image with smollm2 answers without a network"
