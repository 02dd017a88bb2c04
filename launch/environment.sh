# Sourced by the other scripts: changes to the project's folder and sets VENV_PYTHON to the interpreter of a virtual
# environment with requirements.txt installed. The environment is made at the first start and reused afterwards.
# PYTHON selects the interpreter to make it from (default: python3); each minor version has an environment, .venv/3.11 etc.
# VENV_PYTHON selects an interpreter that has the requirements: it is used as it is, and nothing is made.
# With dry_run=1 nothing is made.
# shellcheck shell=bash
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

environment_is_ready() {
  cmp -s requirements.txt "$1/requirements.installed" && "$1/bin/python" -c '' 2>/dev/null
}

make_environment() {
  local venv=$1 python=$2
  echo "making $venv: installs requirements.txt; a few minutes, only this once" >&2
  rm -f "$venv/requirements.installed"
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
      fail "$python has no venv module; Debian and Ubuntu have it in python${venv##*/}-venv; or set PYTHON=/path/to/python3"
    "$python" -m venv --clear "$venv" || fail "could not make $venv, see above"
  fi
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check -r requirements.txt ||
    fail "could not install requirements.txt, see above; start again to go on from there"
  # Last: marks the installation as complete. Without this file the next start continues it.
  cp requirements.txt "$venv/requirements.installed"
}

variable=PYTHON
[[ -n ${VENV_PYTHON:-} ]] && variable=VENV_PYTHON
name=${!variable:-python3}
hint="set $variable=/path/to/python3 (3.11 or newer)"
python=$(command -v "$name") || fail "no $name found; $hint"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || fail "$python does not run; $hint"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$python is Python $version; 3.11 or newer is needed: $hint"
[[ $python == */* && $python != /* ]] && python=$PWD/$python

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $variable == VENV_PYTHON ]]; then
  VENV_PYTHON=$python
else
  venv=.venv/$version
  ((dry_run)) || environment_is_ready "$venv" || make_environment "$venv" "$python"
  VENV_PYTHON=$PWD/$venv/bin/python
fi
# Huge pages for large arrays (agentr1_jax/runtime/processes.py), unless the user has set this variable.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
export VENV_PYTHON
