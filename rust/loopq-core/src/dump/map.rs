//! Memory maps: a file seen as bytes without reading it first, and working memory that the kernel may take back.
#![allow(unsafe_code)] // one of the two places that may; see the arguments below

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;
#[cfg(target_os = "linux")]
use memmap2::MmapMut;

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

/// Lets the kernel take the pages of an anonymous map when memory is short. From then on what the map holds is not
/// defined, page by page, until that page is written again: some pages what was last written, others zeros.
#[cfg(target_os = "linux")]
pub(crate) fn mark_free(map: &MmapMut) -> bool {
    // SAFETY: the map stays in place; only its contents may turn to zeros, at any time before the next write. Its one
    // user is `pages.rs`, which holds no reference into it at that time, hands it out as undefined bytes that are
    // written before they are read, and keeps values only for which every pattern of bits is valid.
    unsafe { map.unchecked_advise(memmap2::UncheckedAdvice::Free) }.is_ok()
}
