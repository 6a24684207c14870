//! Compiles the bridge's C++ half into the static library and hands its header to CMake.
use std::{env, fs, path::PathBuf};

fn main() {
    cxx_build::bridge("src/lib.rs")
        .std("c++20")
        .compile("galley_text_bridge");
    println!("cargo:rerun-if-changed=src/lib.rs");
    println!("cargo:rerun-if-env-changed=GALLEY_TEXT_INCLUDE");
    // Set by CMake: the folder (on its include path) that receives text_bridge.h and rust/cxx.h.
    if let Some(include) = env::var_os("GALLEY_TEXT_INCLUDE").map(PathBuf::from) {
        let generated =
            PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("cxxbridge/include");
        fs::create_dir_all(include.join("rust")).expect("create the include folder");
        fs::copy(
            generated.join("galley_text/src/lib.rs.h"),
            include.join("text_bridge.h"),
        )
        .expect("copy the header");
        fs::copy(generated.join("rust/cxx.h"), include.join("rust/cxx.h")).expect("copy cxx.h");
    }
}
