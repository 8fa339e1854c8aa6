# `nemo-rl-e2e ARGS...`: `doit ARGS...` in the checkout that the caller is in, else on the packed sources.
{ pkgs, python, sources, project }:
pkgs.writeShellApplication {
  name = project.name;
  runtimeInputs = [ python.run pkgs.docker-client pkgs.git pkgs.bash pkgs.coreutils ];
  text = "exec ${python.run}/bin/python ${sources.program}/tasks/installed.py \"$@\"";
}
