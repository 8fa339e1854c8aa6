# Names and versions out of the files that pip reads: nothing is repeated here, so nothing drifts.
let
  lines = file: builtins.filter builtins.isString (builtins.split "\n" (builtins.readFile file));
  characters = text: builtins.genList (i: builtins.substring i 1 text) (builtins.stringLength text);
  normal = builtins.replaceStrings (characters "ABCDEFGHIJKLMNOPQRSTUVWXYZ_.") (characters "abcdefghijklmnopqrstuvwxyz--");
  found = pattern: file: builtins.concatMap (line: let hit = builtins.match pattern line; in if hit == null then [ ] else hit) (lines file);
  names = file: map normal (found "([A-Za-z0-9][A-Za-z0-9._-]*).*" file);
  locked = ../requirements/run.txt;
in
{
  run = names ../requirements/run.in;
  dev = names ../requirements/dev.in;

  # The version that requirements/run.txt pins.
  version = name:
    let hits = found "${name}==([^ ;]+).*" locked; in
    if builtins.length hits == 1 then builtins.head hits else throw "requirements/run.txt does not pin ${name} exactly once";

  # `sha256`, if requirements/run.txt has it.
  hash = sha256:
    if found " *--hash=sha256:(${sha256}).*" locked == [ sha256 ] then sha256
    else throw "nix/python.nix: requirements/run.txt has no hash ${sha256}; take that of the wheel from there";
}
