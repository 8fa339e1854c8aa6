# The runner as a layered image, for machines that have an engine and nothing else. Same inputs, same bits: dockerTools
# stamps every file and the image itself with second 1 of 1970.
{ pkgs, runner, project }:
pkgs.dockerTools.buildLayeredImage {
  name = project.name;
  tag = project.version;
  contents = [ runner pkgs.bash pkgs.coreutils pkgs.git pkgs.docker-client pkgs.dockerTools.usrBinEnv pkgs.dockerTools.caCertificates ];
  extraCommands = "mkdir -m 1777 tmp && mkdir -m 1777 src";
  config = {
    Entrypoint = [ "${runner}/bin/${project.name}" ];
    Cmd = [ "levels" ];
    WorkingDir = "/src";
    Env = [ "HOME=/tmp" "LC_ALL=C.UTF-8" ];
    Labels."org.opencontainers.image.title" = project.name;
    Labels."org.opencontainers.image.version" = project.version;
  };
}
