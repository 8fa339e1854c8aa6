{
  description = "nemo-rl-e2e: does NeMo-RL still train with this Megatron-Bridge change?";

  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-25.11";

  # The content is in nix/; the flake itself lies here so that `nix run .# -- level2` works. From Nix 2.8 on, `./nix` finds it, too.
  outputs = { self, nixpkgs }: import ./nix { inherit nixpkgs; };
}
