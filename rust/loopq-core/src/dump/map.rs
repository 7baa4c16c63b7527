//! A file seen as bytes without reading it first.
#![allow(unsafe_code)] // a map of a file is sound only while nobody changes the file

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use crate::{Error, Result};

/// A read-only memory map. Dumps are written to a temporary name and renamed when complete, so a file that can be
/// found by its name is no longer written to.
#[derive(Debug)]
pub struct MappedFile {
    map: Option<Mmap>,
}

impl MappedFile {
    /// Maps a whole file; an empty one gives no bytes.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |e: std::io::Error| Error::Io { path: path.to_path_buf(), reason: e.to_string() };
        let file = File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.len() == 0 {
            return Ok(Self { map: None });
        }
        // SAFETY: the map is private to this value and read only. Undefined behaviour needs another process that
        // changes or truncates the file while it is mapped; dump files are complete before they get their name and
        // are never written in place (docs/formats/), and the caller is told so. Values are read as plain bytes, for
        // which every bit pattern is valid.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self { map: Some(map) })
    }

    /// The file's bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }
}
