-- Lmod module: set `root` to the clone (or installation) and put this file into a module path.
help([[dsv41-mpi: DeepSeek-V4.1-Flash over MPI]])
whatis("Name: dsv41-mpi")

local root = os.getenv("DSV41_ROOT") or "/opt/dsv41-mpi"
prepend_path("PATH", pathJoin(root, "build/release/bin"))
depends_on("openmpi")
-- The checkpoint that is used without --model:
-- setenv("DSV41_MODEL", "/data/DeepSeek-V4.1-Flash")
