//! Thread pools of explicit size, made once per size and kept.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::{Error, Result};

static POOLS: Mutex<Option<HashMap<usize, Arc<ThreadPool>>>> = Mutex::new(None);

/// The largest number of threads that may be asked for.
pub const MAX_THREADS: usize = 1024;

/// A pool of exactly `threads` threads; 0 stands for as many as the machine gives this process.
pub fn pool(threads: usize) -> Result<Arc<ThreadPool>> {
    if threads > MAX_THREADS {
        return Err(Error::setting("threads", threads, format!("0 (all) to {MAX_THREADS}")));
    }
    let n = if threads == 0 { std::thread::available_parallelism().map_or(1, usize::from) } else { threads };
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    let pools = pools.get_or_insert_with(HashMap::new);
    if let Some(found) = pools.get(&n) {
        return Ok(Arc::clone(found));
    }
    let made = ThreadPoolBuilder::new()
        .num_threads(n)
        .thread_name(|i| format!("loopq-{i}"))
        .build()
        .map_err(|e| Error::Threads { threads: n, reason: e.to_string() })?;
    let made = Arc::new(made);
    pools.insert(n, Arc::clone(&made));
    Ok(made)
}
