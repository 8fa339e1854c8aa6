# Archives that are the same bits for the same sources: no stdenv, one shell, one tar command with everything fixed.
{ system, shell, path }:
let
  sources = import ./sources.nix;
  make = name: src: script: derivation {
    inherit name system src;
    builder = shell;
    # The last command is the shell's own: bash would become a last `tar`, which closes its outputs before it ends, and
    # Nix takes closed outputs for the end and kills what is left.
    args = [ "-c" "set -eu; ${script}\ntest -s \"$out\"" ];
    PATH = path;
    LC_ALL = "C";
    TZ = "UTC";
    PYTHONDONTWRITEBYTECODE = "1";
  };
  tar = "tar --sort=name --mtime=@1 --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --format=gnu -cf \"$out\"";
in
{
  # What is mounted at /e2e/agent of a job.
  agent = make "nemo-rl-e2e-agent.tar" sources.agent ''
    ${tar} -C "$src/containers" agent.py probe.py origins
  '';

  # The two checkouts of the demo, with the commits that every machine generates. Git's index holds inode numbers and
  # times: it is left out, and `git -C bridge reset -q` writes it anew.
  demo-repos = make "nemo-rl-e2e-demo-repos.tar" sources.demo ''
    cp -r "$src" project; chmod -R u+w project
    home=$PWD; cd project
    python3 -c 'import pathlib, sys; from tasks import demo; demo.make(pathlib.Path(sys.argv[1]))' "$home/repos"
    cd "$home/repos"
    find . -path '*/.git/index' -delete
    ${tar} bridge nemo-rl
  '';
}
