# The parts of this project that a derivation depends on, and no more: an edited README rebuilds no archive.
let
  root = ../.;
  length = builtins.stringLength (toString root) + 1;
  below = path: builtins.substring length (builtins.stringLength path) path;
  parts = path: builtins.filter builtins.isString (builtins.split "/" (below path));
  named = name: keep: builtins.path {
    inherit name;
    path = root;
    filter = path: _type: keep (parts path) && builtins.match ".*/(__pycache__|[^/]*\\.pyc)" path == null;
  };
  # `wanted` are paths: everything below them and the folders on the way to them
  only = name: wanted:
    let
      prefix = short: long: builtins.length short <= builtins.length long
        && short == builtins.genList (builtins.elemAt long) (builtins.length short);
      wantedParts = map (path: builtins.filter builtins.isString (builtins.split "/" path)) wanted;
    in
    named name (path: builtins.any (one: prefix one path || prefix path one) wantedParts);
  program = [ "dodo.py" "levels.yaml" "pyproject.toml" "doitw" "tasks" "containers" "requirements" "bench" ];
in
{
  agent = only "agent-source" [ "containers/agent.py" "containers/probe.py" "containers/origins" ];
  demo = only "demo-source" [ "tasks/__init__.py" "tasks/errors.py" "tasks/files.py" "tasks/demo" ];
  program = only "nemo-rl-e2e-source" program;
  tested = only "nemo-rl-e2e-tested" (program ++ [
    "tests" "docs" "mkdocs.yml" "ci" ".ci" "nix" "flake.nix" "flake.lock" "README.md" "ARCHITECTURE.md" "CONTRIBUTING.md" "CHANGELOG.md" "LICENSE" ".gitignore"
  ]);
}
