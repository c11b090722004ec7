#!/usr/bin/env bash
# Installs what the virtual Slurm cluster of tests/slurm needs (Debian or Ubuntu, as root, no questions asked).
# Never fails: where it cannot install, it says why and the Slurm tests skip.
set -uo pipefail
packages=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2 util-linux)
export PATH="$PATH:/usr/sbin:/sbin"

missing=()
for program in slurmctld slurmd sbatch munged ip unshare setpriv; do
    command -v "$program" >/dev/null || missing+=("$program")
done
if [ ${#missing[@]} -eq 0 ]; then
    echo "Slurm is installed: $(dpkg-query -W -f '${Version}' slurmctld 2>/dev/null || echo of unknown version)"
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed: ${missing[*]}; installing them needs root and apt-get, so the Slurm tests will skip"
    exit 0
fi
# The packages must not start their daemons: the tests run their own.
guard=/usr/sbin/policy-rc.d
made_guard=no
if [ ! -e "$guard" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$guard" && chmod +x "$guard" && made_guard=yes
fi
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
install() { timeout 300 apt-get install -y -q --no-install-recommends "${packages[@]}" </dev/null >"$log" 2>&1; }
install || { timeout 120 apt-get update -q </dev/null >>"$log" 2>&1 && install; }
status=$?
[ "$made_guard" = yes ] && rm -f "$guard"
if [ $status -eq 0 ]; then
    echo "installed ${packages[*]}: Slurm $(dpkg-query -W -f '${Version}' slurmctld 2>/dev/null || echo of unknown version)"
else
    echo "apt-get could not install ${packages[*]} (the Slurm tests will skip):"
    tail -n 5 "$log"
fi
rm -f "$log"
exit 0
