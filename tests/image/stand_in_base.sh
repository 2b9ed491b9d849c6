#!/usr/bin/env bash
# Makes a base image where no registry can be reached: Debian as this machine has it, and this machine's Python where the
# official slim image has it, in /usr/local. What is built on it proves the Dockerfile's steps, not the real base's bytes.
#
#   stand_in_base.sh TAG      as root, on Debian; needs mmdebstrap and podman
set -euo pipefail
tag=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python=$(python3 -c 'import sys; print(f"python{sys.version_info[0]}.{sys.version_info[1]}")')
prefix=$(python3 -c 'import sys; print(sys.base_prefix)')
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
sources=$(grep -lE "^(Suites:|deb ).*\b$suite\b" /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources} 2>/dev/null || true)
apt-config dump | grep -E '^Acquire::(https?::|Check-|Retries)' >"$work/apt.conf" || true

if [ "$prefix" = /usr ]; then # Debian's own Python, in which pip must be allowed to install
    packages=python3,python3-pip,python3-venv
    hooks=(--customize-hook='rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED')
else # a Python of its own: it is copied, and the packages come along that its modules are linked with
    packages=$(find "$prefix/bin/$python" "$prefix/lib/$python/lib-dynload" -type f ! -name '_tkinter*' -exec ldd {} + |
        awk '$2 == "=>" && $3 ~ /^\// && !seen[$3]++ { print $3 }' | grep -v "^$prefix" | xargs realpath |
        while read -r library; do dpkg -S "$library" 2>/dev/null || dpkg -S "${library#/usr}" || true; done | cut -d: -f1 | sort -u |
        paste -sd,)
    # shellcheck disable=SC2046 # the names of libraries, separated by lines
    tar -C "$prefix" --exclude='site-packages/*' --exclude='*/test' --exclude='*/config-*' --exclude=__pycache__ \
        -cf "$work/python.tar" "bin/$python" "lib/$python" $(cd "$prefix" && ls lib/libpython*.so* 2>/dev/null || true)
    hooks=(--customize-hook="tar -C \"\$1/usr/local\" --no-same-owner -xf $work/python.tar"
        --customize-hook="ln -s $python \"\$1/usr/local/bin/python3\" && chroot \"\$1\" ldconfig"
        --customize-hook='chroot "$1" python3 -m ensurepip >/dev/null')
fi
# shellcheck disable=SC2086 # the names of files, separated by spaces
mmdebstrap --quiet --variant=minbase --include="ca-certificates,$packages" --aptopt="$work/apt.conf" \
    --dpkgopt=force-unsafe-io --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' "${hooks[@]}" \
    "$suite" "$work/base.tar" $sources
# CMD: as the official image has it, so that it shows when the Dockerfile lets it through.
podman import --quiet --change 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin' \
    --change 'CMD ["python3"]' "$work/base.tar" "$tag" >/dev/null
