# shellcheck shell=bash
# The rest of the program that runner.nix begins: `packed` is the folder of the packed sources, read-only.
# A checkout that the caller is in wins: edits of dodo.py, levels.yaml or tasks/ count, and build/ is the one of ./doitw.

: "${packed:?}"
root=$PWD
until [ -f "$root/dodo.py" ] && [ -f "$root/levels.yaml" ] && [ -f "$root/tasks/invocation.py" ]; do
  root=${root%/*}
  if [ -z "$root" ]; then root=$packed; break; fi
done

words=("$@")
if [ "$root" = "$packed" ]; then
  # doit runs in its own folder, so relative paths of the caller become absolute ones first
  export PYTHONDONTWRITEBYTECODE=1 # root could write into the store
  export E2E_BUILD_DIR=${E2E_BUILD_DIR:-$PWD/build}
  for name in BRIDGE_REPO NEMO_RL_REPO MCORE_REPO E2E_BUILD_DIR E2E_LEVELS; do
    case ${!name:-/} in /* | '~'*) ;; *) export "$name=$PWD/${!name}" ;; esac
  done
  for i in "${!words[@]}"; do
    case ${words[i]} in
      *=/* | *='~'*) ;;
      bridge=?* | nemo_rl=?* | mcore=?* | build=?* | levels=?* | python=?*) words[i]=${words[i]%%=*}=$PWD/${words[i]#*=} ;;
    esac
  done
fi

cd -- "$root" || exit 2
exec python -m doit "${words[@]}"
