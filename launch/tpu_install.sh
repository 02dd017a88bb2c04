#!/usr/bin/env bash
# Makes .venv on a worker of a TPU VM, with requirements.txt, JAX for TPUs, and the packages that are named:
#   bash launch/tpu_install.sh [PACKAGE ...]
# A package that requirements-dev.txt lists is installed in that version. launch/tpu_vm.sh runs this on each worker.
# The images of TPU VMs have a Python older than 3.11, so uv installs one; this needs the internet.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
wanted=('jax[tpu]')
for package; do
  pin=$(sed -n "s/^\($package==[^ ;]*\).*/\1/p" requirements-dev.txt)
  wanted+=("${pin:-$package}")
done
list=$(cat requirements.txt && printf '%s\n' "${wanted[@]}")
if cmp -s - .venv/requirements.installed <<<"$list"; then exit; fi
PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --user --quiet uv || {
  echo "error: could not install uv on $(hostname), see above" >&2
  exit 1
}
uv=$(python3 -c 'import site; print(site.USER_BASE)')/bin/uv
"$uv" venv --clear --quiet --python=3.12 .venv
"$uv" pip install --quiet --python=.venv/bin/python -r requirements.txt "${wanted[@]}"
# Last: marks the installation as complete. Without this file the next start repeats it.
echo "$list" >.venv/requirements.installed
