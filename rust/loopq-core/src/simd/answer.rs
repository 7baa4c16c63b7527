//! Answers about the machine, asked for once.

use std::sync::atomic::{AtomicU8, Ordering};

/// A small number that is found out once and kept. There is no lock, which a forked child could find held by a thread that
/// it does not have: several threads that come first each find the answer out.
pub struct Answer(AtomicU8);

/// No answer is this large.
const UNKNOWN: u8 = u8::MAX;

impl Answer {
    /// Before anybody has asked.
    #[must_use]
    pub const fn unknown() -> Self {
        Self(AtomicU8::new(UNKNOWN))
    }

    /// The answer, which `find` gives where it is not known; the same whenever it is called.
    pub fn or_find(&self, find: impl FnOnce() -> u8) -> u8 {
        match self.0.load(Ordering::Relaxed) {
            UNKNOWN => {
                let found = find();
                self.0.store(found, Ordering::Relaxed);
                found
            }
            known => known,
        }
    }
}
