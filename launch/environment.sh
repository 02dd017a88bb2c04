# Sourced by the other scripts: changes to the project's folder and sets VENV_PYTHON to the interpreter of a virtual
# environment with requirements.txt installed. The environment is made at the first start and reused afterwards.
# With development=1 it has requirements-dev.txt, too: what is missing is added to the same environment.
# PYTHON selects the interpreter to make it from (default: python3); each minor version has an environment, .venv/3.11 etc.
# VENV_PYTHON selects an interpreter that has the requirements: it is used as it is, and nothing is made.
# With dry_run=1 nothing is made.
# shellcheck shell=bash
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
lists=(requirements.txt)
if ((${development:-0})); then lists+=(requirements-dev.txt); fi

# Each list is copied beside the environment when it is installed.
environment_is_ready() {
  local list
  for list in "${lists[@]}"; do
    cmp -s "$list" "$1/${list%.txt}.installed" || return 1
  done
  "$1/bin/python" -c '' 2>/dev/null
}

# uv takes a fifth of pip's time. It does not read which index pip is set up for: there pip installs.
install_by_uv() {
  ! "$1" -m pip config list | grep -q '[.]index-url=' &&
    "$1" -m pip install -qq --disable-pip-version-check uv 2>/dev/null &&
    "$1" -m uv pip install --quiet --python "$1" -r "$2" 2>/dev/null
}

make_environment() {
  local venv=$1 python=$2 list
  echo "making $venv: installs ${lists[*]}; a few minutes, only this once" >&2
  for list in "${lists[@]}"; do rm -f "$venv/${list%.txt}.installed"; done
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
      fail "$python has no venv module; Debian and Ubuntu have it in python${venv##*/}-venv; or set PYTHON=/path/to/python3"
    "$python" -m venv --clear "$venv" || fail "could not make $venv, see above"
  fi
  # `list` is the last one, which includes the other.
  install_by_uv "$venv/bin/python" "$list" ||
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check -r "$list" ||
    fail "could not install ${lists[*]}, see above; start again to go on from there"
  # Last: marks the installation as complete. Without these files the next start continues it.
  for list in "${lists[@]}"; do cp "$list" "$venv/${list%.txt}.installed"; done
}

variable=PYTHON
[[ -n ${VENV_PYTHON:-} ]] && variable=VENV_PYTHON
interpreter=${!variable:-python3}
hint="set $variable=/path/to/python3 (3.11 or newer)"
python=$(command -v "$interpreter") || fail "no $interpreter found; $hint"
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
  ((dry_run)) || ln -sfn "$version/bin/activate" .venv/activate  # `source .venv/activate` whatever the version is
  VENV_PYTHON=$PWD/$venv/bin/python
fi
# Huge pages for large arrays (agentr1_jax/runtime/processes.py), unless the user has set this variable.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
export VENV_PYTHON
