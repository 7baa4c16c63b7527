//! Writes a table of `include_str!` over `kernels/`, so that a wheel carries the CUDA sources.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let crate_dir = env::var("CARGO_MANIFEST_DIR").map_err(io::Error::other)?;
    let out_dir = env::var("OUT_DIR").map_err(io::Error::other)?;
    let kernels = Path::new(&crate_dir).join("../../kernels").canonicalize()?;
    println!("cargo::rerun-if-changed={}", kernels.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(&kernels)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "cu" || e == "cuh") {
            names.push(path);
        }
    }
    names.sort();
    let mut table = String::from("pub(crate) const SOURCES: &[(&str, &str)] = &[\n");
    for path in names {
        let (Some(name), Some(path)) = (path.file_name().and_then(|n| n.to_str()), path.to_str()) else {
            return Err(io::Error::other(format!("{} is not UTF-8", path.display())));
        };
        writeln!(table, "    ({name:?}, include_str!({path:?})),").map_err(io::Error::other)?;
    }
    table.push_str("];\n");
    fs::write(Path::new(&out_dir).join("kernels.rs"), table)
}
