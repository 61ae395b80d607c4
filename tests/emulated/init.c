// The first and only process of the emulated machine: runs /program with the arguments in /arguments (one a line),
// prints "exit <status>" and turns the machine off. What it prints goes to the serial port.
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

int main(void) {
  static char text[4096];
  char* arguments[64] = {"/program"};
  int count = 1;
  FILE* file = fopen("/arguments", "r");
  if (file) {
    fread(text, 1, sizeof(text) - 1, file);
    for (char* line = strtok(text, "\n"); line && count < 63; line = strtok(NULL, "\n"))
      arguments[count++] = line;
  }
  mkdir("/proc", 0755);
  mount("proc", "/proc", "proc", 0, NULL);
  const pid_t program = fork();
  if (program == 0) {
    execv(arguments[0], arguments);
    perror("/program");
    _exit(127);
  }
  int status = 0;
  waitpid(program, &status, 0);
  printf("exit %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  fflush(stdout);
  sleep(1);  // the serial port is slower than we are
  return reboot(RB_POWER_OFF);
}
