// galley: many rows, one stroke.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <new>

#include "app/options.h"
#include "app/version.h"
#include "http/cors.h"
#include "ops/error.h"

namespace galley::app {
namespace {

constexpr int kUsage = 2;  // exit status of a wrong command line, as shells and most tools have it

int run(int argc, char** argv) {
  CLI::App cli(
      "galley serves a large language model to several people at once: every live conversation advances by a\n"
      "token in each pass over the weights, over the OpenAI API.\n\n"
      "  galley serve model.gguf --batch 16      then: curl http://127.0.0.1:8080/v1/models\n"
      "  galley generate model.gguf -p \"Hello\"\n"
      "  galley doctor model.gguf");
  cli.set_version_flag("--version", std::string("galley ") + kVersion);
  cli.require_subcommand(1);
  cli.failure_message([](const CLI::App*, const CLI::Error& e) {
    return fmt::format("galley: {} (galley COMMAND --help explains the flags)\n", e.what());
  });

  ServeOptions serve_options;
  auto* serve_command = cli.add_subcommand("serve", "serve a model over HTTP");
  add_model_options(*serve_command, serve_options.model, true);
  serve_command->add_option("--host", serve_options.host, "address to listen on")->capture_default_str();
  serve_command->add_option("--port", serve_options.port, "0: any free one")
      ->check(CLI::Range(0, 65535))
      ->capture_default_str();
  serve_command->add_option("--prompt-concurrency", serve_options.prompt_concurrency, "prompts prefilled together")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  serve_command
      ->add_option("--prompt-cache-dir", serve_options.model.runtime.prompt_cache_dir,
                   "folder where KV of prompts outlives the process (fused), up to the size of the KV budget")
      ->check(CLI::NonexistentPath | CLI::ExistingDirectory);
  serve_command
      ->add_option(
          "--prefill-stretch", serve_options.prefill_stretch,
          "while streams run, a step with a prompt takes at most so many times as long as one without (fused); "
          "more: faster prefill, longer gaps; 0: no bound")
      ->check(CLI::Range(0.0, 1000.0))
      ->capture_default_str();
  serve_command
      ->add_option("--prefill-step", serve_options.model.prefill_step,
                   "prompt tokens in one step; more: faster prefill, longer gaps in running streams "
                   "[256 fused, 2048 stock]")
      ->check(CLI::Range(1, 1 << 20));
  add_sampling_options(*serve_command, serve_options.sampling);
  serve_command
      ->add_option("--max-tokens", serve_options.max_tokens, "tokens to generate when a request names no number")
      ->check(CLI::Range(1, 1 << 30))
      ->capture_default_str();
  serve_command->add_option("--max-queue", serve_options.max_queue, "waiting requests beyond which clients get a 429")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  serve_command
      ->add_option("--drain-timeout", serve_options.drain_timeout_s,
                   "seconds that running requests get to finish after SIGTERM")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  serve_command->add_option("--log-level", serve_options.log_level, "debug, info, warn or error")
      ->check(CLI::IsMember({"debug", "info", "warn", "error"}))
      ->capture_default_str();
  serve_command->add_flag("--strict-model", serve_options.strict_model,
                          "refuse requests for any other model name (404)");
  serve_command
      ->add_option("--allowed-origin", serve_options.allowed_origins,
                   "origins browsers may call from: local, * or https://host …")
      ->check([](const std::string& rule) {
        return http::is_origin_rule(rule) ? std::string()
                                          : "must be local, * or an origin like https://host:port, not " + rule;
      });

  GenerateOptions generate_options;
  auto* generate_command = cli.add_subcommand("generate", "answer one prompt on standard output");
  add_model_options(*generate_command, generate_options.model, false);
  generate_command->add_option("-p,--prompt", generate_options.prompt, "what to say")->required();
  generate_command->add_option("--system", generate_options.system, "a system message");
  generate_command->add_option("-n,--max-tokens", generate_options.max_tokens, "tokens at most")
      ->check(CLI::Range(1, 1 << 30))
      ->capture_default_str();
  generate_command->add_option("--seed", generate_options.seed, "makes sampling repeatable");
  generate_command->add_flag("--raw", generate_options.raw, "continue the text as it is, without the chat template");
  add_sampling_options(*generate_command, generate_options.sampling);

  BenchOptions bench_options;
  bench_options.model.prefill_step = 512;
  auto* bench_command = cli.add_subcommand("bench", "measure prefill and decode speed of the engine alone");
  add_model_options(*bench_command, bench_options.model, false);
  bench_command->add_option("--batch", bench_options.batch, "rows, a list: 1,4,16")
      ->delimiter(',')
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  bench_command->add_option("--prompt", bench_options.prompt, "prompt tokens a row")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  bench_command->add_option("--generate", bench_options.generate, "decode steps")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  bench_command->add_option("--prefill-step", bench_options.model.prefill_step, "prompt tokens in one step")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  bench_command->add_option("--repeat", bench_options.repeat, "runs of each; the median is reported")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  bench_command->add_flag("--json", bench_options.json, "print one JSON object as the last line");

  ModelOptions doctor_options;
  auto* doctor_command = cli.add_subcommand("doctor", "machine, instruction sets, libraries, and what a model needs");
  add_model_options(*doctor_command, doctor_options, true);
  doctor_command->get_option("--model")->required(false);

  LogitsOptions logits_options;
  auto* logits_command =
      cli.add_subcommand("logits", "write the logits of every position of a text, to measure quality");
  add_model_options(*logits_command, logits_options.model, false);
  logits_command->add_option("--tokens", logits_options.tokens, "file with token ids, separated by white space")
      ->required();
  logits_command->add_option("--out", logits_options.out, "file for [n, vocab] little-endian float32")->required();
  logits_command->add_flag("--dense", logits_options.model.runtime.dense, "stock: expand quantized weights (faster)");

  std::string commands;
  bool known = argc < 2 || argv[1][0] == '-';
  for (const CLI::App* command : cli.get_subcommands(nullptr)) {
    commands += (commands.empty() ? "" : ", ") + command->get_name();
    known = known || command->get_name() == argv[1];
  }
  if (!known) {
    fmt::print(stderr, "galley: there is no command \"{}\"; there are {}\n", argv[1], commands);
    return kUsage;
  }
  try {
    cli.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return cli.exit(e) == 0 ? 0 : kUsage;
  }
  if (*serve_command) return serve(std::move(serve_options));
  if (*generate_command) return generate(std::move(generate_options));
  if (*bench_command) return bench(std::move(bench_options));
  if (*doctor_command) return doctor(std::move(doctor_options));
  return logits(std::move(logits_options));
}

}  // namespace
}  // namespace galley::app

int main(int argc, char** argv) {
  try {
    return galley::app::run(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fputs("galley: out of memory\n", stderr);
  } catch (const std::exception& e) {
    fmt::print(stderr, "galley: {}\n", e.what());
  }
  return 1;
}
