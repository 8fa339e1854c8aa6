# The flake's outputs. Attributes that end in -host touch no nixpkgs: with the lock file present, nothing is fetched for them.
{ nixpkgs }:
let
  project = (builtins.fromTOML (builtins.readFile ../pyproject.toml)).project;
  sources = import ./sources.nix;

  each = function:
    builtins.listToAttrs (map (system: { name = system; value = function system; }) [ "x86_64-linux" "aarch64-linux" ]);

  # Nix's own tools where nixpkgs is at hand; what /bin and /usr/bin have where it is not.
  archives = system: pkgs: import ./archives.nix {
    inherit system;
    shell = "${pkgs.bash}/bin/bash";
    path = builtins.concatStringsSep ":" (map (tool: "${tool}/bin") [ pkgs.coreutils pkgs.gnutar pkgs.git pkgs.python312 ]);
  };
  archivesHost = system: import ./archives.nix { inherit system; shell = "/bin/sh"; path = "/usr/bin:/bin"; };

  outputs = system:
    let
      pkgs = nixpkgs.legacyPackages.${system};
      python = import ./python.nix { inherit pkgs; };
      ours = archives system pkgs;
      host = archivesHost system;
      runner = import ./runner.nix { inherit pkgs python sources project; };
    in
    {
      packages = {
        default = runner;
        image = import ./image.nix { inherit pkgs runner project; };
        inherit (ours) agent demo-repos;
        agent-host = host.agent;
        demo-repos-host = host.demo-repos;
      };

      apps.default = { type = "app"; program = "${runner}/bin/${project.name}"; };

      devShells.default = pkgs.mkShell {
        packages = [ python.dev pkgs.docker-client pkgs.git pkgs.shellcheck ];
        # `doit` alone does not look for modules in the folder that it is called in; `python -m doit` does
        shellHook = ''
          export PYTHONPATH="$(git rev-parse --show-toplevel 2>/dev/null || pwd)''${PYTHONPATH:+:$PYTHONPATH}"
        '';
      };

      checks = {
        inherit (ours) agent demo-repos;
        unit = pkgs.runCommand "nemo-rl-e2e-unit"
          { nativeBuildInputs = [ python.dev pkgs.git pkgs.bash ]; src = sources.tested; }
          ''
            cp -r "$src" project && chmod -R u+w project && cd project
            export HOME="$TMPDIR"
            # warnings of library versions that requirements/*.txt do not pin are no failures here
            python -m pytest -q -p no:cacheprovider -o addopts=--strict-markers -m "not slow and not docker and not real" \
              --ignore tests/integration --ignore tests/real
            touch "$out"
          '';
      };
    };
  by = each outputs;
  only = name: builtins.mapAttrs (_: set: set.${name}) by;
in
{
  packages = only "packages";
  apps = only "apps";
  devShells = only "devShells";
  checks = only "checks";
}
