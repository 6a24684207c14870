// How fast this machine's memory can be read: the ceiling of decoding with one row.
#pragma once

namespace galley::app {

/// Bytes a second that `threads` threads together read from a buffer far larger than any cache; the best of a few
/// passes, in about a fifth of a second. Any thread; allocates 256 MB for the time of the call.
double memory_read_speed(int threads);

}  // namespace galley::app
