{
  description = "A stand-in for nixpkgs: the names that our flake uses, so that all of it evaluates without a network";
  outputs = { self }: {
    legacyPackages = builtins.listToAttrs
      (map (system: { name = system; value = import ./packages.nix system; }) [ "x86_64-linux" "aarch64-linux" ]);
  };
}
