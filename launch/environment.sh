# Sourced by the scripts beside it: enters the project's folder and leaves in VENV_PYTHON the interpreter of a virtual
# environment with requirements.txt installed, made at the first start and reused afterwards.
# PYTHON selects the interpreter it is made from (default: python3); each minor version has its own, .venv/3.11 etc.
# An interpreter that has the requirements already can be given in VENV_PYTHON: it is used as it is, nothing is made.
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
  # Comes last: without it the next start takes up an interrupted install.
  cp requirements.txt "$venv/requirements.installed"
}

given=PYTHON
[[ -n ${VENV_PYTHON:-} ]] && given=VENV_PYTHON
name=${!given:-python3}
hint="set $given=/path/to/python3 (3.11 or newer)"
python=$(command -v "$name") || fail "no $name found; $hint"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || fail "$python does not run; $hint"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$python is Python $version; 3.11 or newer is needed: $hint"
[[ $python == */* && $python != /* ]] && python=$PWD/$python

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $given == VENV_PYTHON ]]; then
  VENV_PYTHON=$python
else
  venv=.venv/$version
  ((dry_run)) || environment_is_ready "$venv" || make_environment "$venv" "$python"
  VENV_PYTHON=$PWD/$venv/bin/python
fi
# Large arrays in huge pages (agentr1_jax/runtime/memory.py); a setting of the user's own stands.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
export VENV_PYTHON
