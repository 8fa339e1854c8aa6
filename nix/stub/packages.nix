# Functions take exactly the arguments that ours pass, so a misspelt one is an error here, too. Tools are the host's
# (/usr); scripts are written for real, so the runner can be run; `python` is the interpreter that $E2E_STUB_PYTHON names.
system:
let
  empty = name: attributes: derivation ({
    inherit name system;
    builder = "/bin/sh";
    args = [ "-c" "mkdir -p \"$out/bin\"" ];
    PATH = "/usr/bin:/bin";
  } // attributes);
  host = { outPath = "/usr"; };

  # Attributes seen in nixpkgs. A requirement that is missing here is an evaluation error: look it up there first.
  seen = [
    "docker" "doit" "hatchling" "hypothesis" "import-linter" "jinja2" "junit-xml" "junitparser" "lxml" "lxml-stubs" "mypy" "numpy"
    "jsonschema" "mkdocs" "pydantic" "pytest" "pytest-timeout" "pytest-xdist" "python-on-whales" "pyyaml" "rich" "ruff"
    "selenium" "tensorboard"
    "types-protobuf" "types-pyyaml" "yamllint"
  ];
  packages = builtins.listToAttrs (map (name: { inherit name; value = empty "stub-${name}" { }; }) seen);
in
{
  bash = host;
  coreutils = host;
  git = host;
  gnutar = host;
  docker-client = host;
  shellcheck = host;
  dockerTools = {
    usrBinEnv = host;
    caCertificates = host;
    buildLayeredImage = { name, tag, contents, extraCommands, config }:
      empty "${name}-${tag}.tar.gz" { inherit extraCommands; contents = map toString contents; config = builtins.toJSON config; };
  };
  python312 = host // {
    pkgs.buildPythonPackage = { pname, version, format, src }: empty "${pname}-${version}" { inherit format src; };
    withPackages = choose: empty "stub-python" {
      packages = choose packages;
      args = [ "-c" "mkdir -p \"$out/bin\"; printf '#!/bin/sh\\nexec \"$E2E_STUB_PYTHON\" \"$@\"\\n' >\"$out/bin/python\"; chmod 755 \"$out/bin/python\"" ];
    };
  };
  fetchPypi = { pname, version, format, dist, python, sha256 }: empty "${pname}-${version}.whl" { inherit sha256; };
  mkShell = { packages, shellHook }: empty "stub-shell" { inherit shellHook; packages = map toString packages; };
  runCommand = name: { nativeBuildInputs, src }: script: empty name { inherit src script; inputs = map toString nativeBuildInputs; };
  writeShellApplication = { name, runtimeInputs, text }: empty name {
    inherit text;
    head = "#!/bin/bash\nset -euo pipefail\nexport PATH=${builtins.concatStringsSep ":" (map (one: "${one}/bin") runtimeInputs)}:$PATH\n";
    args = [ "-c" "mkdir -p \"$out/bin\"; printf '%s%s' \"$head\" \"$text\" >\"$out/bin/${name}\"; chmod 755 \"$out/bin/${name}\"" ];
  };
}
